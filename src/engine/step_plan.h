// What one step runs: its sequences, lane by lane, the number of tokens of each, and the logits
// that are wanted.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/sequence.h"

namespace fathom {

struct StepEntry {
  Sequence* sequence = nullptr;
  int64_t num_tokens = 0;  // beginning at sequence->computed
  // Prompt positions [first, first + num) among those tokens whose logits are wanted for prompt
  // log-probabilities.
  int64_t first_prompt_logit = 0, num_prompt_logits = 0;
  bool samples = false;  // the chunk ends with the newest token, whose logits are sampled
};

struct StepPlan {
  std::vector<StepEntry> entries;  // those of the first lane first
  std::vector<size_t> lane_ends;   // [lanes]: lane l has the entries up to lane_ends[l]
  std::vector<Sequence*> started;  // scheduled for the first time in this step

  bool empty() const { return entries.empty(); }
  void clear() {
    entries.clear();
    lane_ends.clear();
    started.clear();
  }
};

}  // namespace fathom
