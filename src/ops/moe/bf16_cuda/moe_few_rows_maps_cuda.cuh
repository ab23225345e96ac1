// Tensor maps of the weights for the few-token MoE launches (moe_few_rows_work_cuda.cuh), bf16 and
// e4m3 alike. A stage has two halves of 128 bytes of k.
#pragma once

#include "device/cuda/tensor_map.h"
#include "ops/linear/weight_stream_cuda.cuh"
#include "ops/moe/bf16_cuda/moe_cuda.h"

namespace fathom::cuda::few_tokens {

enum Phase { kShared, kRouted, kNumPhases };  // of activations

inline constexpr int kRowBytes = kStageHalves * kGroupBytes;  // 8 rows of a stage
inline constexpr int kPairBytes = 2 * kRowBytes;              // 8 rows of gate and 8 of up
inline constexpr int kPairMaps = 4;                           // boxes of 1, 2, 4 or 8 pairs

struct Maps {
  CUtensorMap gate_up[kNumPhases][kPairMaps];
  CUtensorMap down[kNumPhases][2];  // boxes of hidden_groups groups of 8 rows, and of one less
};

// Indexed by phase; null without a shared expert.
struct Matrices {
  const void *gate_up[kNumPhases], *down[kNumPhases];
  bool e4m3 = false;  // otherwise bf16
};

Maps make_maps(const MoeShape& shape, const Matrices& matrices, int hidden_groups);

}  // namespace fathom::cuda::few_tokens
