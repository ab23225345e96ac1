// Converts a StepPlan into the flat arrays that a model takes, a batch a lane. Reuses their memory
// from step to step.
#pragma once

#include <span>
#include <vector>

#include "engine/step_plan.h"
#include "model/forward_batch.h"
#include "ops/sampling/sample.h"

namespace fathom {

class BatchBuilder {
 public:
  // Valid until the next call. Logit rows are in the order of the plan's entries: an entry's prompt
  // logits, then the rows that it samples from. rows[i] says how the i-th of them is sampled.
  std::span<const ForwardBatch> build(const StepPlan& plan, std::span<const SampleRow> rows);
  // The batches of Runner::draft() before that step, for the entries that have draft rows. Valid
  // until the next call of either.
  std::span<const ForwardBatch> build_drafts(const StepPlan& plan, std::span<const SampleRow> rows);

 private:
  template <typename AddRows>
  std::span<const ForwardBatch> build(const StepPlan& plan, std::span<const SampleRow> rows,
                                      const AddRows& add);

  std::vector<ForwardBatch> batches_;  // [lanes]
};

}  // namespace fathom
