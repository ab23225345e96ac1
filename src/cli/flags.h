// Flags whose errors say what was wrong: "--top-p is 1.5, allowed are 0 to 1".
//
// Every flag has an environment variable, FATHOM_ and its first long name in capitals; the command
// line wins over the environment. Values are checked while the command line is parsed: what a
// command sees is in range.
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

// "4096", "4k" (4,000), "4K" (4,096), "1.5m", "1M", "2g", "2G": vLLM's reading of such numbers.
// Fractions only before the decimal suffixes.
Result<int64_t> parse_count(std::string_view text);

// A finite number, all of text.
Result<double> parse_number(std::string_view text);

// "1,2,3" (white space allowed around the commas): token ids, each at least 0.
Result<std::vector<int32_t>> parse_token_list(std::string_view text);

// Adds flags to one command under one heading of its --help. `names` are as CLI11 takes them:
// "--max-num-batched-tokens,--chunked-prefill-size". The variables must outlive the parsing.
class FlagGroup {
 public:
  FlagGroup(CLI::App& app, std::string heading) : app_(app), heading_(std::move(heading)) {}

  // A number of things, with k/K/m/M/g/G; `fallback` is shown in the help, the variable keeps it.
  CLI::Option* count(const std::string& names, int64_t* value, int64_t min, int64_t max,
                     const std::string& help, const std::string& fallback = "");
  CLI::Option* count(const std::string& names, std::optional<int64_t>* value, int64_t min,
                     int64_t max, const std::string& help, const std::string& fallback = "");
  CLI::Option* number(const std::string& names, std::optional<double>* value, double min,
                      double max, const std::string& help, const std::string& fallback = "");
  // One of a few words.
  CLI::Option* choice(const std::string& names, std::string* value,
                      const std::vector<std::string>& allowed, const std::string& help);
  CLI::Option* text(const std::string& names, std::string* value, const std::string& kind,
                    const std::string& help);
  // May be given several times.
  CLI::Option* texts(const std::string& names, std::vector<std::string>* values,
                     const std::string& kind, const std::string& help);
  CLI::Option* token_ids(const std::string& names, std::vector<int32_t>* values,
                         const std::string& help);
  CLI::Option* toggle(const std::string& names, bool* value, const std::string& help);
  // With names that say no too ("--x,!--no-x"); stays empty when neither is given.
  CLI::Option* toggle(const std::string& names, std::optional<bool>* value,
                      const std::string& help);

 private:
  CLI::Option* finish(CLI::Option* option, const std::string& names, const std::string& kind,
                      const std::string& fallback);

  CLI::App& app_;
  const std::string heading_;
};

// The words that a flag made by FlagGroup::choice() allows, in their order; empty for others.
std::vector<std::string> choices_of(const CLI::Option& option);

// The word of `candidates` that `word` was probably meant to be, if any is near enough.
std::optional<std::string> nearest_word(std::string_view word,
                                        const std::vector<std::string>& candidates);

}  // namespace fathom
