// From a step's logits to tokens, and from a token to what its sequence's event says.
//
// Changes sequences' tokens, history, grammar and text, never their pages or phase; emits nothing.
// Keeps its memory from step to step. Engine thread; sampling may spread over the stream's threads.
#pragma once

#include <vector>

#include "engine/grammar_step.h"
#include "engine/step_plan.h"
#include "ops/sampling/sample.h"
#include "tensor/tensor_view.h"

namespace fathom {

class Postprocess {
 public:
  // Chooses the tokens and computes the log-probabilities that the plan wants. logits: as
  // BatchBuilder ordered the rows. Call it after Scheduler::advance().
  void sample(const StepPlan& plan, ConstTensorView logits, const Stream* stream);

  // Then, for each entry of the plan in order: takes its results, appends the new token, and adds
  // ids, text and log-probabilities to the (cleared) event; sets `finish`, and what goes with it,
  // if the sequence has ended. False: the entry has nothing to tell, its prompt is not through.
  // After std::bad_alloc that entry's sequence is of no use; the other entries are as they were.
  bool append(const StepEntry& entry, Event& event);

 private:
  std::vector<SampleRow> rows_;
  GrammarStep grammars_;
  std::vector<SampledToken> sampled_;  // [rows_]; only grows, for its vectors' memory
  std::vector<SampleScratch> scratch_;
  size_t next_ = 0;  // in sampled_
};

}  // namespace fathom
