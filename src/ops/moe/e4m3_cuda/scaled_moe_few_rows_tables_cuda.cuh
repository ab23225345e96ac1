// Arguments and shared-memory tables (beside the ring and the sums) of the few-token MoE kernel in
// e4m3, scaled_moe_few_rows_cuda.cu.
#pragma once

#include <cstdint>

#include "ops/moe/bf16_cuda/moe_few_rows_work_cuda.cuh"
#include "ops/moe/e4m3_cuda/scaled_moe_cuda.h"

namespace fathom::cuda::scaled_few_tokens {

using namespace few_tokens;

inline constexpr int kScaleUnits = 128 / kGroupRows;  // units of 8 columns that share a scale
inline constexpr int kMultiplyGroups = 2;             // warpgroups
enum NamedBarrier { kAll, kMultiplying, kExchange, kCopying, kGrouping };

struct Arguments {
  static constexpr int kStageColumns = kStageHalves * 128, kRunUnits = kScaleUnits;

  const uint8_t* x;
  const float* x_scales;
  int64_t x_scales_stride;
  const int32_t* expert_ids;
  const float* expert_weights;
  const float *gate_up_scales[kNumPhases], *down_scales[kNumPhases];
  void* out;
  uint64_t* progress;  // [kNumPhases], then a counter for each 128 columns of activations
  // Each [rows, shared_inter] and [pairs, inter]; of scales inter / 128.
  float* wide[kNumPhases];
  uint8_t* activations[kNumPhases];
  float* activation_scales[kNumPhases];
  int32_t rows, hidden, num_experts, experts_per_token, inter, shared_inter;
  int32_t splits, clusters, hidden_groups;  // hidden_groups: at most, of a cluster
  int32_t stages, stage_bytes, sum_bytes, token_groups;
  ScaleForm form;
  bool f32;
};

// Scales of a stage's two 128-column blocks: its tokens', and those of its first and second weight
// rows (gate and up, or two blocks of 128 rows).
struct StageScalesMemory {
  float tokens[kStageHalves][kTileTokens];
  float rows[kStageHalves][2];
};

struct Tables {
  StageScalesMemory scales[kMaxStages];
  uint64_t arrived[kMaxStages], read[kMaxStages];
  uint64_t piece_done, piece_taken;  // by the consumers, by the quantizing warpgroup
  uint64_t listed[2];                // the lists for the first, the second phase are ready
  uint64_t computed[kNumPhases];     // this CTA's activations are written; `awaited` is then known
  uint64_t awaited[kNumPhases];      // value of progress when all CTAs' activations are written
  bool is_last;                      // the piece completes a 128-column scale block
  ExpertTiles experts;

  __device__ int16_t* ids() { return reinterpret_cast<int16_t*>(this + 1); }
  __device__ uint16_t* sorted(int num_pairs) {
    return reinterpret_cast<uint16_t*>(ids() + num_pairs);
  }
};

using ScaledWork = Work<Arguments, Tables>;

}  // namespace fathom::cuda::scaled_few_tokens
