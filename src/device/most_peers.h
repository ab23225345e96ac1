// How many ranks exchange rows in GPU kernels, and how long those are. Needs no CUDA.
#pragma once

#include <cstdint>

namespace fathom::cuda {

inline constexpr int kMostPeers = 8;  // the GPUs that NVLink connects in one machine
inline constexpr int64_t kMostPeerSumColumns = 8192;  // a CTA of 1,024 threads has a row

}  // namespace fathom::cuda
