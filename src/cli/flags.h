// Flags with error messages that name value and limits: "--top-p is 1.5, allowed are 0 to 1".
//
// Each flag has an environment variable: FATHOM_ and its first long name in capitals. The command
// line takes precedence. Values are checked while the command line is parsed, so a command sees
// valid values only.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace fathom {

// Parses "4096", "4k" (4,000), "4K" (4,096), "1.5m", "1M", "2g", "2G", as vLLM does. Fractions are
// allowed only with decimal suffixes.
Result<int64_t> parse_count(std::string_view text);

// Parses a finite number, which must be all of the text.
Result<double> parse_number(std::string_view text);

// Parses token ids, each at least 0: "1,2,3" (white space allowed around the commas).
Result<std::vector<int32_t>> parse_token_list(std::string_view text);

// Adds flags to a command, under one heading of its --help. `names` has CLI11's form:
// "--max-num-batched-tokens,--chunked-prefill-size". The value pointers must stay valid until the
// command line is parsed.
class FlagGroup {
 public:
  FlagGroup(CLI::App& app, std::string heading) : app_(app), heading_(std::move(heading)) {}

  // An integer with an optional suffix k/K/m/M/g/G. `fallback` is the default shown in the help;
  // the variable keeps its initial value.
  CLI::Option* count(const std::string& names, int64_t* value, int64_t min, int64_t max,
                     const std::string& help, const std::string& fallback = "");
  CLI::Option* count(const std::string& names, std::optional<int64_t>* value, int64_t min,
                     int64_t max, const std::string& help, const std::string& fallback = "");
  CLI::Option* number(const std::string& names, std::optional<double>* value, double min,
                      double max, const std::string& help, const std::string& fallback = "");
  // One of several words.
  CLI::Option* choice(const std::string& names, std::string* value,
                      const std::vector<std::string>& allowed, const std::string& help);
  CLI::Option* text(const std::string& names, std::string* value, const std::string& kind,
                    const std::string& help);
  // May be repeated.
  CLI::Option* texts(const std::string& names, std::vector<std::string>* values,
                     const std::string& kind, const std::string& help);
  CLI::Option* token_ids(const std::string& names, std::vector<int32_t>* values,
                         const std::string& help);
  CLI::Option* toggle(const std::string& names, bool* value, const std::string& help);
  // With negated names ("--x,!--no-x"); unset if neither is given.
  CLI::Option* toggle(const std::string& names, std::optional<bool>* value,
                      const std::string& help);

 private:
  CLI::Option* finish(CLI::Option* option, const std::string& names, const std::string& kind,
                      const std::string& fallback);

  CLI::App& app_;
  const std::string heading_;
};

// The words that a flag made by FlagGroup::choice() allows, in order; empty for other flags.
std::vector<std::string> choices_of(const CLI::Option& option);

// The directory that a command writes, as a positional or -o; required.
void add_output_positional(CLI::App& command, std::string* output);

// The candidate that `word` is probably a misspelling of, if any is close enough.
std::optional<std::string> nearest_word(std::string_view word,
                                        const std::vector<std::string>& candidates);

}  // namespace fathom
