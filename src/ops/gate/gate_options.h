// The rules by which a token's experts are selected.
#pragma once

#include <cstdint>

namespace fathom {

// Limits of the GPU kernels.
inline constexpr int kMostGateExperts = 512, kMostGateGroups = 32, kMostChosenExperts = 32;

enum class GateScoring { kSoftmaxGreedy, kSoftmaxGroupLimited, kSigmoidBias };

struct GateOptions {
  GateScoring scoring = GateScoring::kSigmoidBias;
  int64_t num_groups = 1;
  int64_t groups_per_token = 1;
  int64_t experts_per_token = 1;
  bool normalize = false;  // weights divided by their sum (+ 1e-20)
  float scaling = 1;  // routed_scaling_factor; for the softmax kinds not applied when normalised
};

}  // namespace fathom
