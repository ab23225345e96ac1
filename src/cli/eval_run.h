// Runs evaluation sets on a loaded engine: all items of a set at once, with greedy sampling.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cli/eval_set.h"
#include "cli/loaded_engine.h"

namespace fathom {

struct EvalTally {
  int64_t right = 0, of = 0;
  double share() const {
    return of == 0 ? 0 : static_cast<double>(right) / static_cast<double>(of);
  }
};

// Perplexity of prose: exp(nll).
struct EvalPerplexity {
  int64_t tokens = 0;  // predicted tokens
  double nll = 0;      // mean negative log-likelihood per token
  double bits_per_character = 0;
};

struct EvalResult {
  std::string name;
  EvalTally all, direct, thinking;  // items without and with reasoning
  int64_t ended = 0;                // completions that ended with an end-of-sequence id
  std::optional<EvalPerplexity> perplexity;
  double seconds = 0;
  int64_t generated_tokens = 0;
  // Tokens of all completions after their first ones, and the seconds they took: each completion's
  // own, summed, also if several run at once.
  int64_t decoded_tokens = 0;
  double decode_seconds = 0;
  std::vector<std::string> wrong;  // "line 12: expected 7, answered …"
};

// Runs one set. `limit` is the number of rows of prose to score (0: all); items were limited when
// they were read.
Result<EvalResult> run_eval(const LoadedEngine& loaded, const EvalSet& set, int64_t limit,
                            bool show_progress);

// A row is BOS and this many tokens of the text.
inline constexpr int64_t kProseRowTokens = 1023;

}  // namespace fathom
