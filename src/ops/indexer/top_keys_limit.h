// The most columns of select_top_keys() on a GPU.
#pragma once

#include <cstdint>

namespace fathom::cuda {

// The orders of a row's scores stay in the shared memory of a cluster of eight CTAs.
inline constexpr int64_t kMostScoreColumns = int64_t{320} << 10;

}  // namespace fathom::cuda
