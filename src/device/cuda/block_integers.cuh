// Maximum, sum and prefix sum of 64-bit integers over a CTA: the result does not depend on the
// order.
#pragma once

#include <cstdint>

#include "device/cuda/rows.cuh"

namespace fathom::cuda {

// kThreads threads of one CTA; `parts` [kThreads / 32] in shared memory is scratch of these
// functions. All threads call them together.
template <int kThreads>
class BlockIntegers {
 public:
  static constexpr int kWarps = kThreads / kWarp;

  __device__ explicit BlockIntegers(uint64_t* parts)
      : parts_(parts), warp_(threadIdx.x / kWarp), lane_(threadIdx.x % kWarp) {}

  __device__ uint64_t largest(uint64_t x) const {
    return combine(x, [](uint64_t a, uint64_t b) { return a > b ? a : b; });
  }
  __device__ uint64_t sum(uint64_t x) const {
    return combine(x, [](uint64_t a, uint64_t b) { return a + b; });
  }

  // Returns the sum over the threads before this one; `total` is that over all.
  __device__ uint64_t sum_before(uint64_t x, uint64_t* total) const {
    uint64_t inclusive = warp_sum_up_to(x, lane_);
    __syncthreads();
    if (lane_ == kWarp - 1) parts_[warp_] = inclusive;
    __syncthreads();
    uint64_t before = 0, all = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w == warp_) before = all;
      all += parts_[w];
    }
    *total = all;
    return before + inclusive - x;
  }

  // Inclusive prefix sum over the lanes.
  __device__ static uint64_t warp_sum_up_to(uint64_t x, int lane) {
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const uint64_t other = __shfl_up_sync(~0u, x, distance);
      if (lane >= distance) x += other;
    }
    return x;
  }

 private:
  template <typename Combine>
  __device__ uint64_t combine(uint64_t x, Combine of) const {
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
      x = of(x, __shfl_xor_sync(~0u, x, distance));
    }
    __syncthreads();
    if (lane_ == 0) parts_[warp_] = x;
    __syncthreads();
    x = lane_ < kWarps ? parts_[lane_] : 0;
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
      x = of(x, __shfl_xor_sync(~0u, x, distance));
    }
    return x;
  }

  uint64_t* const parts_;
  const int warp_, lane_;
};

}  // namespace fathom::cuda
