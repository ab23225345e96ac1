// Prepares a plan's rows for sampling, and turns sampled tokens into events.
//
// Changes sequences' tokens, history, grammar and text, never their pages or phase. Emits nothing.
// Engine thread; grammars may spread over the stream's threads.
#pragma once

#include <span>
#include <vector>

#include "engine/grammar_step.h"
#include "engine/step_plan.h"
#include "ops/sampling/sample.h"

namespace fathom {

// A step from plan to results. Its memory is reused by later steps.
struct Step {
  int64_t number = 0;
  RequestTimings::Time begun;
  StepPlan plan;
  std::vector<SampleRow> rows;  // in the order of BatchBuilder's logit rows
  GrammarStep grammars;
};

// Fills step.rows from its plan, before the step begins.
void choose_rows(Step& step, const Stream* stream);

// Appends an unknown token to each sequence that is sampled. The scheduler has reserved the memory.
void add_unknown_tokens(const Step& step);

// The results of a finished step, consumed entry by entry.
class StepResults {
 public:
  // Feeds the sampled tokens to the step's grammars.
  StepResults(Step& step, std::span<const SampledToken> sampled, const Stream* stream);

  // Called for each entry of the plan, in order. Consumes the entry's results, replaces the
  // sequence's oldest unknown token by the sampled one, and adds ids, text and log-probabilities to
  // the (cleared) event. Sets `finish` and the fields that go with it if the sequence ends. Returns
  // false if there is nothing to emit: the prompt is not complete, or the sequence ended since the
  // step began. After std::bad_alloc the entry's sequence must be ended; other entries are not
  // affected.
  bool append(const StepEntry& entry, Event& event);

 private:
  std::span<const SampledToken> left_;
};

}  // namespace fathom
