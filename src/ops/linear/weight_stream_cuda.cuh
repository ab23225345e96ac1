// What kernels have in common that stream weights past few tokens: a ring of stages in shared
// memory, filled by copies and read by tensor cores.
//
// A stage holds kBoxes * 64 columns (k) of up to 64 rows a warpgroup of weights, and of up to
// kColumns tokens. Both come in groups of 8 rows, kBoxes * 1,024 bytes each: first their first 64
// columns (8 rows of 128 bytes, swizzled), then the next. Rows that no copy filled hold anything:
// they give rows and columns of the product that nobody reads.
#pragma once

#include <cstdint>

#include "device/cuda/mma_columns.cuh"
#include "device/cuda/ptx.cuh"

namespace fathom::cuda {

inline constexpr int kGroupRows = 8;        // of weights: the swizzle's pattern
inline constexpr int kWarpgroupGroups = 8;  // 64 rows: M of the tensor core's instruction

// Which stage is next, and how often the ring has gone round: the parity that barriers wait for.
struct RingPosition {
  int stage = 0, parity = 0;

  __device__ void advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Where 16 bytes of a group's row lie: the swizzle.
__device__ inline int swizzled_chunk(int row, int chunk) {
  return row * 128 + ((chunk ^ (row % 8)) * 16);
}

// Products of a warpgroup's 64 rows with one stage's columns; one commit group.
template <int kColumns, int kBoxes>
__device__ void multiply_stage(float (&d)[kColumns / 2], uint32_t weights, uint32_t tokens,
                               bool add) {
  mma_fence();
#pragma unroll
  for (int k = 0; k < kBoxes * 4; ++k) {
    const int box = k / 4, within = k % 4 * 32;
    mma_columns(d, swizzled_matrix(weights + box * 1024 + within, kBoxes * 1024),
                swizzled_matrix(tokens + box * 1024 + within, kBoxes * 1024), add || k > 0);
  }
  mma_commit();
}

// The stages of one tile, as they arrive, added up in d. Stage s of the ring lies at ring + s *
// stage_bytes, this warpgroup's weights `weights` bytes behind that, the tokens `tokens` bytes.
// Ends when all has been read and given back. kStored: tokens came by copies other than the copy
// engine's, of which tensor cores learn through a fence.
template <int kColumns, int kBoxes, bool kStored>
__device__ void multiply_tile(float (&d)[kColumns / 2], RingPosition& at, int num_stages,
                              int stages, uint32_t ring, int stage_bytes, int weights, int tokens,
                              uint64_t* arrived, uint64_t* read) {
#pragma unroll
  for (float& value : d) value = 0;
  for (int i = 0; i < num_stages; ++i) {
    barrier_wait(&arrived[at.stage], at.parity);
    if constexpr (kStored) fence_async_proxy();
    const uint32_t base = ring + at.stage * stage_bytes;
    multiply_stage<kColumns, kBoxes>(d, base + weights, base + tokens, i > 0);
    // At once, not a turn later: what is being read cannot be on its way again.
    mma_wait();
    if (threadIdx.x % 32 == 0) barrier_arrive(&read[at.stage]);
    at.advance(stages);
  }
}

}  // namespace fathom::cuda
