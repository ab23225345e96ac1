// Shared by the GEMV kernels, which multiply single rows by streams of weights: a warp's slots in
// shared memory, each filled by bulk copies with up to 4 KB of a row of weights, or of a few short
// ones.
#pragma once

#include <cstdint>

#include "device/cuda/bulk_copy.cuh"
#include "device/cuda/rows.cuh"

namespace fathom::cuda {

inline constexpr int kPieceColumns = 2048;  // of a row of weights, at most

// The next slot, and how often a warp's slots have been reused.
struct SlotTurn {
  int slot = 0, parity = 0;

  __device__ void advance(int slots) {
    if (++slot == slots) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// Adds eight columns' products to two sums.
__device__ inline float2 multiply_eight(uint4 w, uint4 x, float2 sum) {
  const auto add = [&](uint32_t w_pair, uint32_t x_pair) {
    sum.x += low_bf16(w_pair) * low_bf16(x_pair);
    sum.y += high_bf16(w_pair) * high_bf16(x_pair);
  };
  add(w.x, x.x), add(w.y, x.y), add(w.z, x.z), add(w.w, x.w);
  return sum;
}

}  // namespace fathom::cuda
