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
  // Rows behind them: the first of sequence->drafts.
  int64_t num_drafts = 0;
  // Prompt positions [first, first + num) among those tokens whose logits are wanted for prompt
  // log-probabilities.
  int64_t first_prompt_logit = 0, num_prompt_logits = 0;
  // How many of the sampled rows are tokens of the sequence; set when the step has ended.
  int64_t run_length = 0;
  // The chunk ends with the newest token. Its logits and those of the drafts are sampled.
  bool samples = false;
  // Its tokens end here, of the sequence's run with so many preemptions before it.
  int64_t end = 0, preemptions = 0;

  int64_t num_rows() const { return num_tokens + num_drafts; }
  int64_t num_sampled() const { return samples ? 1 + num_drafts : 0; }
  // Whether the MTP layer runs over the sequence's newest tokens before the step: they are drafted
  // from, or the last step's drafts have become tokens.
  bool has_draft_rows() const { return num_drafts > 0 || sequence->mtp_len < sequence->computed; }
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
