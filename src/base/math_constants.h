// Mathematical constants that host code and kernels share.
#pragma once

#include <limits>

namespace fathom {

// log2(e) as the nearest float: exp(x) = exp2(x * kLog2E).
inline constexpr float kLog2E = 1.4426950408889634f;

// The maximum of no scores, and a masked logit.
inline constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

}  // namespace fathom
