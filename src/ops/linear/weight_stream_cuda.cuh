// Shared by the kernels that stream weights past few tokens (skinny GEMM): a ring buffer of stages
// in shared memory, filled by copies and read by wgmma.
//
// A stage holds 128 columns (k) of up to 64 rows a warpgroup of weights, and of up to 64 tokens:
// twice 64 columns, which are rows of 128 bytes (in e4m3 twice 128 columns), swizzled; 8 rows are a
// group of 1,024 bytes. Rows that no copy filled hold arbitrary bits: the result rows and columns
// they produce are discarded. Few large boxes: issuing one costs some 100 clocks, as long as 2 KB
// take to arrive.
#pragma once

#include <cstdint>

#include "device/cuda/ptx.cuh"
#include "device/cuda/wgmma.cuh"

namespace fathom::cuda {

inline constexpr int kGroupBytes = 1024;
inline constexpr int kGroupRows = 8;        // rows of weights: the swizzle's period
inline constexpr int kWarpgroupGroups = 8;  // 64 rows: wgmma's M

// The next stage, and how often the ring has wrapped: the parity that barriers wait for.
struct RingPosition {
  int stage = 0, parity = 0;

  __device__ void advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Swizzled position of 16 bytes of a group's row.
__device__ inline int swizzled_chunk(int row, int chunk) {
  return row * 128 + ((chunk ^ (row % 8)) * 16);
}

// Position of an operand in a stage, in bytes.
struct StageOperand {
  int begin;         // from the stage's first byte
  int half_stride;   // to the second 64 columns
  int group_stride;  // to the next 8 rows
};

inline constexpr int kStageHalves = 2, kStageColumns = kStageHalves * 64;

// Matrix descriptors of a stage's operands, for each half.
struct StageMatrices {
  uint64_t weights[kStageHalves], tokens[kStageHalves];

  __device__ StageMatrices(uint32_t stage, const StageOperand& of_weights,
                           const StageOperand& of_tokens) {
#pragma unroll
    for (int half = 0; half < kStageHalves; ++half) {
      weights[half] = matrix(stage, of_weights, half);
      tokens[half] = matrix(stage, of_tokens, half);
    }
  }

 private:
  __device__ static uint64_t matrix(uint32_t stage, const StageOperand& operand, int half) {
    return uniform_matrix(
        swizzled_matrix(stage + operand.begin + half * operand.half_stride, operand.group_stride));
  }
};

// kOverlap: the next stage's wgmma begins before this one's has ended, which releases a stage one
// turn late.
template <int kColumns, bool kStored, bool kOverlap>
__device__ void multiply_stages(float (&d)[kColumns / 2], RingPosition& at, int num_stages,
                                int stages, uint32_t ring, int stage_bytes,
                                const StageOperand& weights, const StageOperand& tokens,
                                uint64_t* arrived, uint64_t* read) {
#pragma unroll
  for (float& value : d) value = 0;
  int before = -1;
  for (int i = 0; i < num_stages; ++i) {
    const StageMatrices stage(ring + at.stage * stage_bytes, weights, tokens);
    barrier_wait(&arrived[at.stage], at.parity);
    if constexpr (kStored) fence_async_proxy();
    mma_fence();
#pragma unroll
    for (int k = 0; k < kStageHalves * 4; ++k) {
      const int half = k / 4, within = k % 4 * 32;
      mma_64(d, moved(stage.weights[half], within), moved(stage.tokens[half], within),
             i > 0 || k > 0);
    }
    mma_commit();
    mma_wait<kOverlap ? 1 : 0>();
    if (!kOverlap) before = at.stage;
    if (before >= 0 && threadIdx.x % 32 == 0) barrier_arrive(&read[before]);
    before = at.stage;
    at.advance(stages);
  }
  if constexpr (kOverlap) {
    mma_wait();
    if (before >= 0 && threadIdx.x % 32 == 0) barrier_arrive(&read[before]);
  }
}

// Accumulates the stages of one tile in d, as they arrive. Stage s of the ring lies at ring + s *
// stage_bytes. kStored: tokens were written by plain stores, which wgmma sees only after a proxy
// fence. Returns when all stages have been read and released.
template <int kColumns, bool kStored>
__device__ void multiply_tile(float (&d)[kColumns / 2], RingPosition& at, int num_stages,
                              int stages, uint32_t ring, int stage_bytes,
                              const StageOperand& weights, const StageOperand& tokens,
                              uint64_t* arrived, uint64_t* read) {
  if constexpr (kColumns <= 16) {
    // With few large stages, no stage is held longer than its wgmma takes.
    constexpr int kManyStages = 6;
    if (stages >= kManyStages) {
      return multiply_stages<kColumns, kStored, true>(d, at, num_stages, stages, ring, stage_bytes,
                                                      weights, tokens, arrived, read);
    }
  }
  multiply_stages<kColumns, kStored, false>(d, at, num_stages, stages, ring, stage_bytes, weights,
                                            tokens, arrived, read);
}

// ---- e4m3

// A stage's two halves are k blocks with scales.
struct StageScales {
  const float* tokens;      // in shared memory: first stage, first half, first token
  int tokens_stage_stride;  // floats
  int tokens_half_stride;
  const float* rows[2];  // of the warp's first and second 8 rows: one value a k block of the tile
};

// multiply_tile for e4m3: a half's wgmmas end before their sums are promoted with the scales.
template <int kColumns>
__device__ void multiply_scaled_tile(float (&d)[kColumns / 2], RingPosition& at, int num_stages,
                                     int stages, uint32_t ring, int stage_bytes,
                                     const StageOperand& weights, const StageOperand& tokens,
                                     const StageScales& scales, uint64_t* arrived, uint64_t* read) {
#pragma unroll
  for (float& value : d) value = 0;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int i = 0; i < num_stages; ++i) {
    const StageMatrices stage(ring + at.stage * stage_bytes, weights, tokens);
    barrier_wait(&arrived[at.stage], at.parity);
    float products[kStageHalves][kColumns / 2];
    mma_fence();
#pragma unroll
    for (int half = 0; half < kStageHalves; ++half) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        mma_64_e4m3(products[half], moved(stage.weights[half], k * 32),
                    moved(stage.tokens[half], k * 32), k > 0);
      }
      mma_commit();
    }
    // Scales are read while the wgmmas are in flight.
    float2 of_tokens[kColumns / 8];
    float of_rows[2];
    const auto read_scales = [&](int half) {
      const float* from = scales.tokens + at.stage * scales.tokens_stage_stride +
                          half * scales.tokens_half_stride + 2 * (lane % 4);
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        of_tokens[j] = *reinterpret_cast<const float2*>(from + 8 * j);
      }
#pragma unroll
      for (int lower = 0; lower < 2; ++lower) {
        of_rows[lower] = scales.rows[lower][i * kStageHalves + half];
      }
    };
    const auto add = [&](int half) {
#pragma unroll
      for (int j = 0; j < kColumns / 2; j += 4) {
#pragma unroll
        for (int lower = 0; lower < 2; ++lower) {
          float* sums = d + j + 2 * lower;
          const float* more = products[half] + j + 2 * lower;
          sums[0] = fmaf(more[0], of_tokens[j / 4].x * of_rows[lower], sums[0]);
          sums[1] = fmaf(more[1], of_tokens[j / 4].y * of_rows[lower], sums[1]);
        }
      }
    };
    read_scales(0);
    mma_wait<1>();
    pin(products[0]);
    add(0);
    read_scales(1);
    mma_wait<0>();
    pin(products[1]);
    add(1);
    if (lane == 0) barrier_arrive(&read[at.stage]);
    at.advance(stages);
  }
}

}  // namespace fathom::cuda
