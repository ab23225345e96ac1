// Plain sampling in double precision with full sorts: the reference for sample(). Test code only.
#pragma once

#include <map>
#include <set>
#include <span>
#include <vector>

#include "ops/sampling/sample.h"

namespace fathom {

struct ReferenceDistribution {
  std::map<int32_t, double> kept;  // id -> probability after truncation, sums to 1
  // Distance of the closest decision (what top-p or min-p keeps), in probability: below some 1e-6
  // single precision may decide otherwise.
  double margin = 1;
};

// The distribution of a row under the options, given the tokens before.
ReferenceDistribution reference_distribution(std::span<const float> logits,
                                             const SampleOptions& options,
                                             std::span<const int32_t> prompt,
                                             std::span<const int32_t> output,
                                             const std::set<int32_t>& masked);

// The token at `uniform` in the cumulative distribution, and how close the draw was to another.
int32_t reference_draw(const ReferenceDistribution& distribution, double uniform, double* margin);

// log-softmax of the row.
std::vector<double> reference_logprobs(std::span<const float> logits);

}  // namespace fathom
