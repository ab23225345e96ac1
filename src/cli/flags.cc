#include "cli/flags.h"

#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>

#include "base/math.h"

namespace fathom {
namespace {

// "--max-model-len" from "-l,--max-model-len,--context-length".
std::string first_long_name(const std::string& names) {
  const size_t begin = names.find("--");
  const size_t end = names.find(',', begin);
  return names.substr(begin, end == std::string::npos ? end : end - begin);
}

std::string environment_name(const std::string& names) {
  std::string name = "FATHOM_";
  for (const char c : first_long_name(names).substr(2)) {
    name += c == '-' ? '_' : static_cast<char>(c >= 'a' && c <= 'z' ? c - 'a' + 'A' : c);
  }
  return name;
}

// The value name of a choice in --help, by which choices_of() recognizes it: "--dtype WORD", "…:
// auto, float32".
constexpr const char* kChoice = "WORD";
constexpr std::string_view kChoices = ": ";

[[noreturn]] void refuse(const std::string& message) { throw CLI::ValidationError(message); }

int64_t count_of_suffix(char suffix) {
  switch (suffix) {
    case 'k':
      return 1'000;
    case 'K':
      return 1 << 10;
    case 'm':
      return 1'000'000;
    case 'M':
      return 1 << 20;
    case 'g':
      return 1'000'000'000;
    case 'G':
      return 1 << 30;
    default:
      return 0;
  }
}

int64_t checked_count(const std::string& flag, const std::string& text, int64_t min, int64_t max) {
  const auto value = parse_count(text);
  if (!value) refuse(fmt::format("{} is \"{}\", {}", flag, text, value.error().message));
  if (*value < min || *value > max) {
    refuse(max == std::numeric_limits<int64_t>::max()
               ? fmt::format("{} is {}, the least allowed is {}", flag, text, min)
               : fmt::format("{} is {}, allowed are {} to {}", flag, text, min, max));
  }
  return *value;
}

}  // namespace

Result<int64_t> parse_count(std::string_view text) {
  constexpr const char* kExpected = "expected a whole number, possibly with k, K, m, M, g or G";
  const int64_t unit = text.empty() ? 0 : count_of_suffix(text.back());
  const std::string_view digits = unit > 0 ? text.substr(0, text.size() - 1) : text;
  int64_t whole = 0;
  const auto read = std::from_chars(digits.data(), digits.data() + digits.size(), whole);
  if (read.ec == std::errc::result_out_of_range) return invalid("a number beyond 64 bits");
  if (read.ec == std::errc() && read.ptr == digits.data() + digits.size()) {
    const auto scaled = checked_mul(whole, std::max<int64_t>(unit, 1));
    if (!scaled) return invalid("a number beyond 64 bits");
    return *scaled;
  }
  // 1.5k is 1,500; fractions of 1,024 are ambiguous.
  const bool decimal_suffix = unit > 0 && unit % 1000 == 0;
  const auto number = decimal_suffix ? parse_number(digits) : Result<double>(invalid("none"));
  if (!number) return invalid("{}", kExpected);
  const double scaled = *number * static_cast<double>(unit);
  if (std::abs(scaled) > 0x1p62) return invalid("a number beyond 64 bits");
  return std::llround(scaled);
}

Result<double> parse_number(std::string_view text) {
  double value = 0;
  const auto read = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || read.ec != std::errc() || read.ptr != text.data() + text.size() ||
      !std::isfinite(value)) {
    return invalid("expected a number");
  }
  return value;
}

Result<std::vector<int32_t>> parse_token_list(std::string_view text) {
  std::vector<int32_t> ids;
  for (std::string_view rest = text;;) {
    const size_t comma = rest.find(',');
    std::string_view word = rest.substr(0, comma);
    const size_t first = word.find_first_not_of(" \t\r\n");
    const size_t last = word.find_last_not_of(" \t\r\n");
    word = first == std::string_view::npos ? "" : word.substr(first, last - first + 1);
    int32_t id = 0;
    const auto read = std::from_chars(word.data(), word.data() + word.size(), id);
    if (word.empty() || read.ec != std::errc() || read.ptr != word.data() + word.size() || id < 0) {
      return invalid("expected token ids with commas between, \"{}\" is none", word.substr(0, 40));
    }
    ids.push_back(id);
    if (comma == std::string_view::npos) return ids;
    rest.remove_prefix(comma + 1);
  }
}

CLI::Option* FlagGroup::finish(CLI::Option* option, const std::string& names,
                               const std::string& kind, const std::string& fallback) {
  option->group(heading_)->envname(environment_name(names));
  if (!kind.empty()) option->type_name(kind);
  if (!fallback.empty()) option->default_str(fallback);
  return option;
}

CLI::Option* FlagGroup::count(const std::string& names, int64_t* value, int64_t min, int64_t max,
                              const std::string& help, const std::string& fallback) {
  const std::string flag = first_long_name(names);
  const auto read = [=](const std::string& text) { *value = checked_count(flag, text, min, max); };
  return finish(app_.add_option_function<std::string>(names, read, help), names, "N",
                fallback.empty() ? std::to_string(*value) : fallback);
}

CLI::Option* FlagGroup::count(const std::string& names, std::optional<int64_t>* value, int64_t min,
                              int64_t max, const std::string& help, const std::string& fallback) {
  const std::string flag = first_long_name(names);
  const auto read = [=](const std::string& text) { *value = checked_count(flag, text, min, max); };
  return finish(app_.add_option_function<std::string>(names, read, help), names, "N", fallback);
}

CLI::Option* FlagGroup::number(const std::string& names, std::optional<double>* value, double min,
                               double max, const std::string& help, const std::string& fallback) {
  const std::string flag = first_long_name(names);
  const auto read = [=](const std::string& text) {
    const auto number = parse_number(text);
    if (!number) refuse(fmt::format("{} is \"{}\", {}", flag, text, number.error().message));
    if (*number < min || *number > max) {
      refuse(fmt::format("{} is {}, allowed are {} to {}", flag, text, min, max));
    }
    *value = *number;
  };
  return finish(app_.add_option_function<std::string>(names, read, help), names, "X", fallback);
}

CLI::Option* FlagGroup::choice(const std::string& names, std::string* value,
                               const std::vector<std::string>& allowed, const std::string& help) {
  const std::string flag = first_long_name(names);
  const auto read = [=](const std::string& text) {
    if (std::find(allowed.begin(), allowed.end(), text) == allowed.end()) {
      refuse(fmt::format("{} is \"{}\", allowed are {}", flag, text, fmt::join(allowed, ", ")));
    }
    *value = text;
  };
  const std::string text = fmt::format("{}{}{}", help, kChoices, fmt::join(allowed, ", "));
  return finish(app_.add_option_function<std::string>(names, read, text), names, kChoice, *value);
}

CLI::Option* FlagGroup::text(const std::string& names, std::string* value, const std::string& kind,
                             const std::string& help) {
  return finish(app_.add_option(names, *value, help), names, kind, "");
}

CLI::Option* FlagGroup::texts(const std::string& names, std::vector<std::string>* values,
                              const std::string& kind, const std::string& help) {
  CLI::Option* option = app_.add_option(names, *values, help);
  // One value per occurrence of the flag, because a prompt may follow.
  option->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->allow_extra_args(false);
  return finish(option, names, kind, "");
}

CLI::Option* FlagGroup::token_ids(const std::string& names, std::vector<int32_t>* values,
                                  const std::string& help) {
  const std::string flag = first_long_name(names);
  const auto read = [=](const std::string& text) {
    auto ids = parse_token_list(text);
    if (!ids) refuse(fmt::format("{}: {}", flag, ids.error().message));
    *values = std::move(*ids);
  };
  return finish(app_.add_option_function<std::string>(names, read, help), names, "ID,ID,…", "");
}

CLI::Option* FlagGroup::toggle(const std::string& names, bool* value, const std::string& help) {
  return finish(app_.add_flag(names, *value, help), names, "", "");
}

CLI::Option* FlagGroup::toggle(const std::string& names, std::optional<bool>* value,
                               const std::string& help) {
  // `balance` is the number of positive occurrences minus negated ones.
  const auto read = [=](int64_t balance) { *value = balance > 0; };
  return finish(app_.add_flag_function(names, read, help), names, "", "");
}

void add_output_positional(CLI::App& command, std::string* output) {
  command
      .add_option("OUTPUT,-o,--output,--output-dir", *output,
                  "Directory to write: a new one, or that of an interrupted run (also -o)")
      ->required()
      ->type_name("");
}

std::vector<std::string> choices_of(const CLI::Option& option) {
  if (option.get_type_name() != kChoice) return {};
  const std::string& help = option.get_description();
  std::vector<std::string> words;
  for (size_t begin = help.rfind(kChoices) + kChoices.size(); begin <= help.size();) {
    const size_t end = std::min(help.find(", ", begin), help.size());
    words.push_back(help.substr(begin, end - begin));
    begin = end + 2;
  }
  return words;
}

std::optional<std::string> nearest_word(std::string_view word,
                                        const std::vector<std::string>& candidates) {
  // The edit distance (Levenshtein): letters inserted, removed or replaced.
  const auto changes = [word](std::string_view other) {
    std::vector<size_t> row(other.size() + 1);
    for (size_t j = 0; j <= other.size(); ++j) row[j] = j;
    for (size_t i = 1; i <= word.size(); ++i) {
      size_t diagonal = row[0];
      row[0] = i;
      for (size_t j = 1; j <= other.size(); ++j) {
        const size_t replaced = diagonal + (word[i - 1] == other[j - 1] ? 0 : 1);
        diagonal = row[j];
        row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
      }
    }
    return row[other.size()];
  };
  constexpr size_t kLongestFlag = 64;
  if (word.size() > kLongestFlag) return std::nullopt;
  std::optional<std::string> best;
  // Up to a third of the letters may differ.
  size_t fewest = std::max<size_t>(2, word.size() / 3) + 1;
  for (const std::string& candidate : candidates) {
    if (const size_t count = changes(candidate); count < fewest) {
      fewest = count;
      best = candidate;
    }
  }
  return best;
}

}  // namespace fathom
