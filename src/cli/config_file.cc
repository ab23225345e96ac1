#include "cli/config_file.h"

#include <yaml-cpp/yaml.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <map>

#include "base/json.h"
#include "cli/flags.h"

namespace fathom {
namespace {

// Beyond it the file is something else, given by mistake.
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

// The flag of that name; the flags that end the program when they are given count as none.
const CLI::Option* find_flag(const CLI::App& command, const std::string& name) {
  if (name == "help" || name == "config") return nullptr;
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

Result<std::vector<std::string>> config_arguments(const std::string& path,
                                                  const CLI::App& command) {
  FATHOM_TRY(const std::vector<ConfigEntry> entries, read_config_file(path));
  std::vector<std::string> arguments;
  std::map<const CLI::Option*, int> lines;
  for (const ConfigEntry& entry : entries) {
    const CLI::Option* const option = find_flag(command, entry.flag);
    if (option == nullptr) return unknown_flag(path, entry, command);
    // Two spellings of a flag would otherwise be two values of it.
    if (const auto [earlier, is_first] = lines.emplace(option, entry.line); !is_first) {
      return invalid("{}:{}: {} is set by line {} already", path, entry.line, entry.flag,
                     earlier->second);
    }
    if (entry.is_list && option->get_multi_option_policy() != CLI::MultiOptionPolicy::TakeAll) {
      return invalid("{}:{}: {} takes one value, not a list", path, entry.line, entry.flag);
    }
    if (option->count() > 0) continue;
    for (const std::string& value : entry.values) {
      arguments.push_back("--" + entry.flag + "=" + value);
    }
  }
  return arguments;
}

}  // namespace fathom
