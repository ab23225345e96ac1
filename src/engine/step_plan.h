// What one step does: which sequences run, how many tokens of each, and whose logits are wanted.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/sequence.h"

namespace fathom {

struct StepEntry {
  Sequence* sequence = nullptr;
  int64_t num_tokens = 0;  // from sequence->computed on
  // Prompt positions [first, first + num) inside those tokens whose logits are wanted for prompt
  // log-probabilities.
  int64_t first_prompt_logit = 0, num_prompt_logits = 0;
  bool samples = false;  // the chunk ends with the newest token: its logits choose the next
};

struct StepPlan {
  std::vector<StepEntry> entries;
  std::vector<Sequence*> started;  // scheduled for the first time in this step

  bool empty() const { return entries.empty(); }
  void clear() {
    entries.clear();
    started.clear();
  }
};

}  // namespace fathom
