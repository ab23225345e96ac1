// From a plan to what is to be chosen, and from a token to what its sequence's event says.
//
// Changes sequences' tokens, history, grammar and text, never their pages or phase; emits nothing.
// Engine thread; grammars may spread over the stream's threads.
#pragma once

#include <span>
#include <vector>

#include "engine/grammar_step.h"
#include "engine/step_plan.h"
#include "ops/sampling/sample.h"

namespace fathom {

// A step from its plan to its results. Keeps its memory for the next.
struct Step {
  int64_t number = 0;
  RequestTimings::Time begun;
  StepPlan plan;
  std::vector<SampleRow> rows;  // as BatchBuilder orders the logit rows
  GrammarStep grammars;
};

// Before the step begins: step.rows, from its plan.
void choose_rows(Step& step, const Stream* stream);

// Each sequence that is sampled gets a token that is not known yet; the scheduler has made room.
void add_unknown_tokens(const Step& step);

// The results of a step that has ended, taken entry by entry.
class StepResults {
 public:
  // The step's grammars take their tokens.
  StepResults(Step& step, std::span<const SampledToken> sampled, const Stream* stream);

  // For each entry of the plan in order; its sequence may have ended since the step began: takes
  // its results, makes its unknown token known, and adds ids, text and log-probabilities to the
  // (cleared) event; sets `finish`, and what goes with it, if the sequence ends. False: there is
  // nothing to tell, the prompt is not through or the sequence has ended before. After
  // std::bad_alloc that entry's sequence is of no use; the other entries are as they were.
  bool append(const StepEntry& entry, Event& event);

 private:
  std::span<const SampledToken> left_;
};

}  // namespace fathom
