// Tiles of scaled_expert_products_cuda.cuh, their shapes, and the shared memory of a CTA.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <type_traits>

#include "base/math_constants.h"
#include "device/cuda/tensor_copy.cuh"
#include "ops/scaled_linear/quantize_block_cuda.cuh"

namespace fathom::cuda {

// Destination and valid extent of a CTA's half of a tile's results.
struct alignas(16) ScaledExpertOut {
  void* data = nullptr;     // first element: e4m3 if gated, else bf16
  float* scales = nullptr;  // of the first token, if gated; one of the two CTAs writes them
  int row_stride = 0;       // in elements
  int tokens = 0, columns = 0;
  int k_steps = 0;  // 0: no more tiles
  ScaleForm form = ScaleForm::kF32;
};

// Scales of a tile, for its shared-memory slot.
struct ScaledExpertScales {
  const float* tokens = nullptr;   // of the first token, the first k
  int64_t tokens_stride = 0;       // to the next 128-column block of k
  const float* weights = nullptr;  // of the CTA's first row, the first k
  int second = 0;                  // gated: offset from gate's to up's
};

// Tokens of a tile, for its shared-memory slot.
struct alignas(16) ScaledExpertTokens {
  const CUtensorMap* map = nullptr;  // boxes of half of a tile's tokens
  int first = 0;
  int units = 0;  // units of Shape::kTokenUnit tokens in a box
};

struct ScaledExpertTile {
  const CUtensorMap* weights = nullptr;  // gated: boxes of columns, 8, 2, 4 groups, halves
  int first_row = 0;                     // of weights; gated: group of 16 rows of gate
  bool weights_are_read_once = false;    // by this launch: evict first from the L2
  ScaledExpertTokens tokens;
  ScaledExpertScales scales;
  ScaledExpertOut out;
};

template <bool kGatedRows, int kTokenCount, int kGroupCount, int kStageCount>
struct ScaledExpertShape {
  static constexpr bool kGated = kGatedRows;
  static constexpr int kTokens = kTokenCount, kGroups = kGroupCount, kStages = kStageCount;
  static constexpr int kBlocks = 2;  // CTAs of a cluster
  static constexpr int kTileRows = 256, kWeightRows = kTileRows / kBlocks;
  static constexpr int kScales = kGated ? 2 : 1;  // scales of a CTA's weights in a k step
  // Each CTA loads half of the tokens, in boxes of up to kTokenUnits units.
  static constexpr int kTokenUnit = 16, kTokenUnits = kTokens / kTokenUnit / kBlocks;
  static constexpr int kWeightBytes = kWeightRows * 128, kTokenBytes = kTokens * 128;
  static constexpr int kSums = kWeightRows / 2;  // sums of a thread for 64 tokens
  static constexpr int kUnits = (kTokens / 64 + kGroups - 1) / kGroups;  // of 64 tokens a group
  // Whether few last tokens take less than a warpgroup's 64 (scaled_expert_tail_cuda.cuh).
  static constexpr bool kTails = kUnits == 1;
  static constexpr int kThreads = 128 * (kGroups + 1);
  static constexpr int kScalers = 2;  // warps
  // Scaler warps alternate over tiles, or share the tokens of each tile.
  static constexpr int kScalerTurns = kTokens == 64 ? 2 : 1;
  static constexpr int kProducerRegisters = kGroups == 3 ? 56 : 56;
  static constexpr int kConsumerRegisters = kGroups == 3 ? 152 : 224;
  // Registers a thread at launch, a multiple of 8; setmaxnreg may only redistribute them.
  static_assert(kGroups * kConsumerRegisters + kProducerRegisters <=
                (kGroups + 1) * (65536 / kThreads / 8 * 8));
  static_assert(kTokens % 64 == 0);
};

// Magnitudes from the other CTA of the cluster: the largest of each warp's 16 tokens, for this tile
// and the next.
struct NoMagnitudes {};
template <typename Shape>
struct OtherMagnitudes {
  float of[2][4 * Shape::kGroups][16];
  uint64_t received[2][4 * Shape::kGroups];
};

// The same of the last tokens of an expert, each in all warps of a warpgroup.
inline constexpr int kTailTokens = 32;
template <typename Shape>
struct TailMagnitudes {
  float of[2][Shape::kGroups][kTailTokens];
  uint64_t received[2][Shape::kGroups];
};

template <typename Shape>
struct ScaledExpertMemory {
  alignas(1024) uint8_t weights[Shape::kStages][Shape::kWeightBytes];
  alignas(1024) uint8_t tokens[Shape::kStages][Shape::kTokenBytes];
  // Token scales times weight scales.
  alignas(16) float scales[Shape::kStages][Shape::kScales][Shape::kTokens];
  // 64 bytes of results for each of 16 tokens, per consumer warp.
  alignas(1024) uint8_t out[4 * Shape::kGroups][16 * 64];
  alignas(16) std::conditional_t<Shape::kGated, OtherMagnitudes<Shape>, NoMagnitudes> other;
  alignas(16)
      std::conditional_t<Shape::kGated && Shape::kTails, TailMagnitudes<Shape>, NoMagnitudes> tail;
  // Ring of tile metadata: the tile in its epilogue, those in the pipeline stages, the next one,
  // and those that an idle scaler may not have read yet.
  static constexpr int kTiles = Shape::kStages + 1 + Shape::kScalerTurns;
  // Tiles planned at a time in a fixed order: tiles of few tokens end soonest.
  static constexpr int kPlanned = Shape::kTokens <= 128 ? 32 : 1;
  ScaledExpertTile planned[kPlanned];
  ScaledExpertOut tiles[kTiles];
  ScaledExpertTokens tile_tokens[kTiles];
  ScaledExpertScales tile_scales[kTiles];
  int next[kTiles];  // tile index, in the cluster's second CTA
  uint64_t announced[kTiles], told[kTiles];
  uint64_t arrived[Shape::kStages];
  // Empty barriers: consumers of this CTA, and of both CTAs.
  uint64_t read[Shape::kStages], read_by_both[Shape::kStages];
};

// An activation of a column of gate and of the same of up.
__device__ inline float gated_activation(float gate, float up) {
  return __fdividef(gate, 1.0f + exp2_fast(-kLog2E * gate)) * up;
}

}  // namespace fathom::cuda
