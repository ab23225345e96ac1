// top-k, top-p and min-p as one cutoff in the order of logits: everything at or above it is kept.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "base/math_constants.h"
#include "ops/sampling/sample.h"

namespace fathom {

// The last token kept, in the order of descending logit and, among equals, ascending id.
struct Cutoff {
  float logit = kNegativeInfinity;
  int32_t id = std::numeric_limits<int32_t>::max();

  bool keeps(float other, int32_t other_id) const {
    return other > logit || (other == logit && other_id <= id);
  }
};

// The cutoff for the options' top_k, top_p, min_p and temperature. `max` is the largest logit, and
// scratch.maxima holds the row's block maxima.
Cutoff find_cutoff(std::span<const float> logits, float max, const SampleOptions& options,
                   SampleScratch& scratch);

// scratch.candidates = the `count` largest logits above -inf (fewer if there are fewer), in
// descending order. scratch.maxima holds the row's block maxima.
void select_top(std::span<const float> logits, int64_t count, SampleScratch& scratch);

}  // namespace fathom
