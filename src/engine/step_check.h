// Checks a step that came over the network before a model reads it: no value in it may lead outside
// of the weights, the cache or the rows.
#pragma once

#include <cstdint>
#include <span>

#include "base/status.h"
#include "model/forward_batch.h"
#include "ops/sampling/sample.h"

namespace fathom {

struct StepBounds {
  int64_t vocab_size = 0;
  int64_t max_model_len = 0;  // positions
  int64_t num_pages = 0;      // of a lane
  int64_t max_rows = 0;       // of a lane
  int64_t max_drafts = 0;     // of a sequence
};

// kInvalidArgument with the lane, the field, its value and the limit.
Result<> check_batch(const ForwardBatch& batch, int lane, const StepBounds& bounds);
// The same of a step that drafts: `states` are the lane's; the draft step before, if nothing came
// between, had `num_before` logit rows in it.
Result<> check_draft_batch(const ForwardBatch& batch, std::span<const int32_t> states,
                           int64_t num_before, int lane, const StepBounds& bounds);
// `num_logits`: the logit rows of the lanes that are sampled here; each needs one sample row.
Result<> check_rows(std::span<const SampleRow> rows, int64_t num_logits, const StepBounds& bounds);

}  // namespace fathom
