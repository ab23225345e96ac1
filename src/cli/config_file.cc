#include "cli/config_file.h"

#include <yaml-cpp/yaml.h>

#include <CLI/CLI.hpp>
#include <algorithm>

#include "base/json.h"
#include "cli/flags.h"
#include "cli/foreign_flags.h"

namespace fathom {
namespace {

// A larger file is not a configuration file.
constexpr int64_t kMaxBytes = 1 << 20;

int line_of(const YAML::Mark& mark) { return mark.line + 1; }

Result<ConfigEntry> read_entry(const std::string& path, const YAML::Node& key,
                               const YAML::Node& value) {
  ConfigEntry entry;
  entry.line = line_of(key.Mark());
  if (!key.IsScalar()) return invalid("{}:{}: expected \"flag: value\"", path, entry.line);
  entry.flag = key.Scalar();
  std::replace(entry.flag.begin(), entry.flag.end(), '_', '-');
  entry.is_list = value.IsSequence();
  if (value.IsScalar()) entry.values.push_back(value.Scalar());
  bool readable = value.IsScalar() || (value.IsSequence() && value.size() > 0);
  if (value.IsSequence()) {
    for (const YAML::Node& item : value) {
      readable = readable && item.IsScalar();
      if (readable) entry.values.push_back(item.Scalar());
    }
  }
  if (!readable) {
    return invalid("{}:{}: {} is neither a value nor a list of values", path, entry.line,
                   entry.flag);
  }
  return entry;
}

// Flags that end the program or read another file.
bool is_reserved(const std::string& name) { return name == "help" || name == "config"; }

// The flag with that name; null for reserved ones.
const CLI::Option* find_flag(const CLI::App& command, const std::string& name) {
  if (is_reserved(name)) return nullptr;
  for (const CLI::Option* option : command.get_options()) {
    if (option->check_lname(name)) return option;
  }
  return nullptr;
}

tl::unexpected<Status> unknown_flag(const std::string& path, const ConfigEntry& entry,
                                    const CLI::App& command) {
  std::vector<std::string> names;
  for (const CLI::Option* option : command.get_options()) {
    for (const std::string& name : option->get_lnames()) {
      if (find_flag(command, name) != nullptr) names.push_back(name);
    }
  }
  const auto nearest = nearest_word(entry.flag, names);
  return invalid("{}:{}: fathom {} has no flag \"{}\" for a file{}", path, entry.line,
                 command.get_name(), entry.flag,
                 nearest ? fmt::format("; did you mean {}?", *nearest) : "");
}

bool takes_list(const CLI::Option& option) {
  return option.get_multi_option_policy() == CLI::MultiOptionPolicy::TakeAll;
}

// MODEL from the command line, or from the file.
std::string model_of(const CLI::App& command, const std::vector<ConfigEntry>& entries) {
  const CLI::Option* const option = find_flag(command, "model");
  if (option == nullptr) return "";
  if (option->count() > 0) return option->as<std::string>();
  for (const ConfigEntry& entry : entries) {
    if (option->check_lname(entry.flag) && !entry.values.empty()) return entry.values.front();
  }
  return "";
}

}  // namespace

Result<std::vector<ConfigEntry>> read_config_file(const std::string& path) {
  const auto text = read_text_file(path, kMaxBytes);
  if (!text) return with_context("--config: ", text.error());
  try {
    const std::vector<YAML::Node> documents = YAML::LoadAll(*text);
    if (documents.size() > 1) return invalid("{}: has more than one document", path);
    std::vector<ConfigEntry> entries;
    if (documents.empty() || documents.front().IsNull()) return entries;
    const YAML::Node& document = documents.front();
    if (!document.IsMap()) {
      return invalid("{}:{}: expected \"flag: value\"", path, line_of(document.Mark()));
    }
    for (const auto& pair : document) {
      FATHOM_TRY(ConfigEntry entry, read_entry(path, pair.first, pair.second));
      entries.push_back(std::move(entry));
    }
    return entries;
  } catch (const YAML::Exception& problem) {
    return invalid("{}:{}: {}", path, line_of(problem.mark), problem.msg);
  }
}

Result<ConfigArguments> config_arguments(const std::string& path, const CLI::App& command) {
  FATHOM_TRY(const std::vector<ConfigEntry> entries, read_config_file(path));
  const std::string model = model_of(command, entries);
  ConfigArguments result;
  for (const ConfigEntry& entry : entries) {
    const CLI::Option* const written = find_flag(command, entry.flag);
    if (written == nullptr && (is_reserved(entry.flag) || !is_foreign_flag(entry.flag))) {
      return unknown_flag(path, entry, command);
    }
    if (entry.is_list && written != nullptr && !takes_list(*written)) {
      return invalid("{}:{}: {} takes one value, not a list", path, entry.line, entry.flag);
    }
    std::vector<std::string> words;
    for (const std::string& value : entry.values) words.push_back("--" + entry.flag + "=" + value);
    auto line = translate_launch_line(command, words, model);
    if (!line) return with_context(fmt::format("{}:{}: ", path, entry.line), line.error());
    result.notes.insert(result.notes.end(), line->notes.begin(), line->notes.end());
    // The canonical flag, so that two spellings do not count as two values.
    const CLI::Option* option = written;
    if (!line->arguments.empty()) {
      const std::string& first = line->arguments.front();
      option = find_flag(command, first.substr(2, first.find('=') - 2));
    }
    if (option == nullptr) continue;
    const std::string& name = option->get_lnames().front();
    if (const auto [earlier, is_first] = result.lines.emplace(name, entry.line); !is_first) {
      return invalid("{}:{}: {} is set by line {} already", path, entry.line, entry.flag,
                     earlier->second);
    }
    if (option->count() > 0) continue;
    result.arguments.insert(result.arguments.end(), line->arguments.begin(), line->arguments.end());
  }
  return result;
}

}  // namespace fathom
