#include "cli/help_format.h"

#include "base/utf8.h"

namespace fathom {
namespace {

constexpr size_t kColumns = 100;
constexpr size_t kLeft = 40;

size_t width_of(std::string_view text) {
  size_t width = 0;
  for (size_t at = 0; at < text.size(); ++width) {
    at += static_cast<size_t>(decode_utf8(text, at).length);
  }
  return width;
}

// "  left          right, wrapped and
//                  indented".
std::string two_columns(const std::string& left, const std::string& right) {
  std::string text = "  " + left;
  size_t column = width_of(text);
  if (column + 2 > kLeft) {
    text += '\n';
    column = 0;
  }
  text.append(kLeft - column, ' ');
  column = kLeft;
  for (size_t begin = 0; begin < right.size();) {
    // "[env: NAME]" is not broken across lines.
    const char last = right[begin] == '[' ? ']' : ' ';
    size_t end = std::min(right.find(last, begin), right.size());
    if (last == ']' && end < right.size()) ++end;
    const std::string word = right.substr(begin, end - begin);
    begin = end + 1;
    if (column > kLeft && column + 1 + width_of(word) > kColumns) {
      text += '\n' + std::string(kLeft, ' ');
      column = kLeft;
    }
    if (column > kLeft) text += ' ';
    column += width_of(word) + (column > kLeft ? 1 : 0);
    text += word;
  }
  return text + '\n';
}

}  // namespace

std::string HelpFormat::make_group(std::string group, bool is_positional,
                                   std::vector<const CLI::Option*> options) const {
  // CLI11 ends each group of flags with an empty line, but not the positionals.
  const bool follows_positionals = is_positional || group == "Options";
  std::string text = (follows_positionals ? "\n" : "") + group + ":\n";
  for (const CLI::Option* option : options) {
    // An option that is also a positional is described there.
    if (!is_positional && option->get_positional()) continue;
    text += make_option(option, is_positional);
  }
  return text;
}

std::string HelpFormat::make_option(const CLI::Option* option, bool is_positional) const {
  std::string left = is_positional ? option->get_name(true) : option->get_name(false, true);
  // CLI11 marks negated names with this; the description explains them.
  constexpr std::string_view kNo = "{false}";
  for (size_t at = left.find(kNo); at != std::string::npos; at = left.find(kNo)) {
    left.erase(at, kNo.size());
  }
  const bool takes_value = option->get_type_size() != 0;
  if (!is_positional && takes_value && !option->get_type_name().empty()) {
    left += " " + option->get_type_name();
  }
  std::string right = option->get_description();
  if (takes_value && !option->get_default_str().empty()) {
    right += " (default: " + option->get_default_str() + ")";
  }
  if (!option->get_envname().empty()) right += " [env: " + option->get_envname() + "]";
  return two_columns(left, right);
}

std::string HelpFormat::make_subcommand(const CLI::App* command) const {
  // A command with subcommands is shown as those: "bench serve".
  const auto commands = command->get_subcommands([](const CLI::App*) { return true; });
  std::string text;
  for (const CLI::App* inner : commands) {
    text += two_columns(command->get_name() + " " + inner->get_name(), inner->get_description());
  }
  return commands.empty() ? two_columns(command->get_name(), command->get_description()) : text;
}

}  // namespace fathom
