// Plain sampling in double precision with full sorts: the reference for sample(). Test code only.
#pragma once

#include <map>
#include <set>
#include <span>
#include <vector>

#include "ops/sampling/gumbel_noise.h"
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

// The token with the largest ln p + noise of the kept ones, and by how much it leads.
int32_t reference_draw(const ReferenceDistribution& distribution, const NoiseKey& key,
                       double* lead);

// The noise of a token by the mathematical library's logarithms.
double reference_noise(const NoiseKey& key, int32_t id);

// log-softmax of the row.
std::vector<double> reference_logprobs(std::span<const float> logits);

}  // namespace fathom
