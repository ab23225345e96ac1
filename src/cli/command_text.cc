#include "cli/command_text.h"

#include <CLI/CLI.hpp>

#include "cli/flags.h"

namespace fathom {
namespace {

FlagText flag_text(const CLI::Option& option) {
  FlagText text;
  for (const std::string& name : option.get_lnames()) text.names.push_back("--" + name);
  for (const std::string& name : option.get_snames()) text.names.push_back("-" + name);
  const bool takes_value = option.get_items_expected_max() > 0;
  if (takes_value) text.kind = option.get_type_name().empty() ? "VALUE" : option.get_type_name();
  text.help = option.get_description();
  if (takes_value) text.fallback = option.get_default_str();
  text.variable = option.get_envname();
  text.heading = option.get_group();
  text.choices = choices_of(option);
  text.repeats = takes_value && option.get_multi_option_policy() == CLI::MultiOptionPolicy::TakeAll;
  return text;
}

void add_command(const CLI::App& command, const std::string& path,
                 std::vector<CommandText>* texts) {
  const auto inner = command.get_subcommands([](const CLI::App* one) {
    return !one->get_group().empty();  // commands without a group are hidden
  });
  if (inner.empty() || path.empty()) {
    CommandText text{path, command.get_description(), command.get_footer(), {}, {}};
    for (const CLI::Option* option : command.get_options()) {
      if (option->get_positional()) text.words.push_back(option->get_name(true));
      if (!option->get_lnames().empty()) text.flags.push_back(flag_text(*option));
    }
    texts->push_back(std::move(text));
  }
  for (const CLI::App* one : inner) {
    add_command(*one, path.empty() ? one->get_name() : path + " " + one->get_name(), texts);
  }
}

}  // namespace

std::vector<CommandText> command_texts(const CLI::App& app) {
  std::vector<CommandText> texts;
  add_command(app, "", &texts);
  return texts;
}

}  // namespace fathom
