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
  RequestTimings::Time drafted;  // its drafts were there; equals begun without drafting
  StepPlan plan;
  std::vector<SampleRow> rows;  // in the order of BatchBuilder's logit rows
  GrammarStep grammars;
};

// Fills step.rows for Runner::draft(): how the token after each sequence's newest is sampled, of
// those that have drafts.
void choose_draft_rows(Step& step);

// Gives each entry its drafts, sequence by sequence. Those from an id on that ends the sequence are
// dropped: no row behind them can be reached.
void take_drafts(StepPlan& plan, std::span<const int32_t> drafts);

// Fills step.rows from its plan, before the step begins. Drops drafts that a grammar forbids.
void choose_rows(Step& step, const Stream* stream);

// Appends an unknown token to each sequence that is sampled. The scheduler has reserved the memory.
void add_unknown_tokens(const Step& step);

// The results of a finished step, consumed entry by entry. A sequence's rows are its tokens as long
// as each row's draft is the token that was sampled in the row before: tokens are sampled exactly
// as they would be without drafts, one after another.
class StepResults {
 public:
  // Verifies the drafts, and feeds the sampled tokens to the step's grammars.
  StepResults(Step& step, std::span<const SampledToken> sampled, const Stream* stream);

  // Called for each entry of the plan, in order. Consumes the entry's results, replaces the
  // sequence's oldest unknown token by the sampled one and appends those that follow, one by one
  // until one ends the sequence, and adds ids, text and log-probabilities to the (cleared) event.
  // Sets `finish` and the fields that go with it if the sequence ends. Returns
  // false if there is nothing to emit: the prompt is not complete, or the sequence ended since the
  // step began. After std::bad_alloc the entry's sequence must be ended; other entries are not
  // affected.
  bool append(const StepEntry& entry, Event& event);

 private:
  std::span<const SampledToken> left_;
};

}  // namespace fathom
