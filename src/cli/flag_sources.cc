#include "cli/flag_sources.h"

#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdlib>
#include <set>

#include "cli/flags.h"

namespace fathom {
namespace {

constexpr std::string_view kPrefix = "FATHOM_";
// Variables read elsewhere: device/cpu/isa.h and ops/linear/cublas_lt_product_cuda.cc.
constexpr const char* kOtherVariables[] = {"FATHOM_CPU_ISA", "FATHOM_CUBLASLT"};

// "--port" from "--port is …"; empty for other messages.
std::string_view flag_of(std::string_view message) {
  if (!message.starts_with("--")) return "";
  return message.substr(0, message.find_first_of(" :="));
}

bool is_typed(const CLI::Option& option, const std::vector<std::string>& typed) {
  return std::any_of(typed.begin(), typed.end(), [&](const std::string& word) {
    if (word.starts_with("--")) return option.check_lname(word.substr(2, word.find('=') - 2));
    return word.size() > 1 && word[0] == '-' && option.check_sname(word.substr(1, 1));
  });
}

void collect_variables(const CLI::App& app, std::set<std::string>* names) {
  for (const CLI::Option* option : app.get_options()) {
    if (!option->get_envname().empty()) names->insert(option->get_envname());
  }
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    collect_variables(*command, names);
  }
}

// Whether all parts of `wanted` occur in `name`: "MAX_SEQS" in "MAX_NUM_SEQS".
bool has_parts_of(const std::string& name, const std::string& wanted) {
  const std::string padded = "_" + name + "_";
  for (size_t begin = 0; begin <= wanted.size();) {
    const size_t end = std::min(wanted.find('_', begin), wanted.size());
    if (padded.find("_" + wanted.substr(begin, end - begin) + "_") == std::string::npos) {
      return false;
    }
    begin = end + 1;
  }
  return true;
}

}  // namespace

FlagSources::FlagSources(const CLI::App& command, std::vector<std::string> typed)
    : command_(command), typed_(std::move(typed)) {}

void FlagSources::add_file(const std::string& path, std::map<std::string, int> lines) {
  path_ = path;
  lines_ = std::move(lines);
}

std::string FlagSources::prefix_of(std::string_view message) const {
  const std::string flag(flag_of(message));
  const CLI::Option* const option = flag.size() > 2 ? command_.get_option_no_throw(flag) : nullptr;
  if (option == nullptr || is_typed(*option, typed_)) return "";
  // The environment takes precedence over the file.
  const char* const variable =
      option->get_envname().empty() ? nullptr : std::getenv(option->get_envname().c_str());
  if (variable != nullptr && *variable != '\0') return option->get_envname() + ": ";
  const auto line = lines_.find(option->get_lnames().front());
  return line == lines_.end() ? "" : fmt::format("{}:{}: ", path_, line->second);
}

std::vector<std::string> misspelt_variables(const CLI::App& app) {
  std::set<std::string> known(std::begin(kOtherVariables), std::end(kOtherVariables));
  collect_variables(app, &known);
  // Without the common prefix, which would make all of them similar.
  std::vector<std::string> endings;
  for (const std::string& name : known) endings.push_back(name.substr(kPrefix.size()));
  std::vector<std::string> sentences;
  for (char** one = environ; one != nullptr && *one != nullptr; ++one) {
    const std::string_view text = *one;
    const std::string name(text.substr(0, text.find('=')));
    if (!name.starts_with(kPrefix) || known.contains(name)) continue;
    const std::string ending = name.substr(kPrefix.size());
    auto meant = nearest_word(ending, endings);
    for (const std::string& other : endings) {
      if (!meant && has_parts_of(other, ending)) meant = other;
    }
    if (!meant) continue;
    sentences.push_back(
        fmt::format("{} is set and no flag has it; did you mean {}{}?", name, kPrefix, *meant));
  }
  std::sort(sentences.begin(), sentences.end());
  return sentences;
}

}  // namespace fathom
