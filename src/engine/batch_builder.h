// Converts a StepPlan into the flat arrays that a model takes. Reuses their memory from step to
// step.
#pragma once

#include "engine/step_plan.h"
#include "model/forward_batch.h"

namespace fathom {

class BatchBuilder {
 public:
  // Valid until the next call. Logit rows are in the order of the plan's entries: an entry's prompt
  // logits, then the row that it samples from.
  const ForwardBatch& build(const StepPlan& plan);

 private:
  void add_rows(const StepEntry& entry);

  ForwardBatch batch_;
};

}  // namespace fathom
