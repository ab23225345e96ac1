// What kernels have in common that stream weights past few tokens: a ring of stages in shared
// memory, filled by copies and read by tensor cores.
//
// A stage holds 128 columns (k) of up to 64 rows a warpgroup of weights, and of up to 64 tokens:
// twice 64 columns, which are rows of 128 bytes (of e4m3 it holds twice 128 columns), swizzled, 8
// of them a group of 1,024 bytes. Rows that no copy filled hold anything: they give rows and
// columns of the product that nobody reads. Few large boxes: to ask for one costs some 100 clocks,
// as long as 2 KB take to arrive.
#pragma once

#include <cstdint>

#include "device/cuda/ptx.cuh"
#include "device/cuda/wgmma.cuh"

namespace fathom::cuda {

inline constexpr int kGroupBytes = 1024;
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

// Where an operand lies in a stage, in bytes.
struct StageOperand {
  int begin;         // from the stage's first byte
  int half_stride;   // to the second 64 columns
  int group_stride;  // to the next 8 rows
};

inline constexpr int kStageHalves = 2, kStageColumns = kStageHalves * 64;

// A stage's operands as the tensor core's instructions name them: of its halves.
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

// kOverlap: the next stage's product begins before this one's has ended, which gives a stage back a
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

// The stages of one tile, as they arrive, added up in d. Stage s of the ring lies at ring + s *
// stage_bytes. kStored: tokens came by copies other than the copy engine's, of which tensor cores
// learn through a fence. Ends when all has been read and given back.
template <int kColumns, bool kStored>
__device__ void multiply_tile(float (&d)[kColumns / 2], RingPosition& at, int num_stages,
                              int stages, uint32_t ring, int stage_bytes,
                              const StageOperand& weights, const StageOperand& tokens,
                              uint64_t* arrived, uint64_t* read) {
  if constexpr (kColumns <= 16) {
    // Of few large stages none is to be kept longer than its product takes.
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

// A stage's two halves are blocks of k that have scales.
struct StageScales {
  const float* tokens;      // in shared memory: of the ring's first stage, first half, first token
  int tokens_stage_stride;  // floats
  int tokens_half_stride;
  const float* rows[2];  // of the warp's first 8 rows and its second: one value a block of the tile
};

// multiply_tile of e4m3: the products of a half end before the sums take them times the scales.
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
    // Scales are read while the products are still under way.
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
