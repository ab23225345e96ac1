// A compiled PCRE2 pattern over well-formed UTF-8. Immutable; any thread.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "base/status.h"

struct pcre2_real_code_8;
struct pcre2_real_match_data_8;

namespace fathom {

struct Match {
  size_t begin = 0, end = 0;  // byte offsets, begin < end
  int group = 0;              // the highest group that matched, 0 if the pattern has none
};

class Regex {
 public:
  // Compiles a pattern. Refuses one that PCRE2 refuses or that can match the empty string.
  static Result<Regex> compile(const std::string& pcre2_pattern);

  // Scratch memory of a search: one per thread, reused for many searches.
  class Scratch {
   public:
    Scratch();
    ~Scratch();
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;

   private:
    friend class Regex;
    pcre2_real_match_data_8* match_data_;
  };

  // Returns the first match at or after `from`. A search that exceeds the match limit (10 million
  // steps, for patterns that backtrack without end) finds nothing.
  std::optional<Match> find(std::string_view subject, size_t from, Scratch& scratch) const;

 private:
  struct Free {
    void operator()(pcre2_real_code_8* code) const;
  };
  explicit Regex(pcre2_real_code_8* code) : code_(code) {}
  std::unique_ptr<pcre2_real_code_8, Free> code_;
};

}  // namespace fathom
