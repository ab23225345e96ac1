// The launches around the grouped GEMMs of experts with many tokens: rows sorted by expert before
// them, each token's weighted sum after them. One launch each; no synchronization with the host.
#pragma once

#include <cstdint>

#include "device/cuda/gpu_stream.h"
#include "ops/moe/plans/moe_few_rows_plan.h"
#include "ops/moe/plans/moe_many_rows_plan.h"
#include "tensor/dtype.h"

namespace fathom::cuda {

// Counts the tokens of each expert, gives every (token, expert) a row among the sorted ones, an
// expert's rows together and aligned to kExpertRowUnit, and lists row tiles.
struct SortByExpertArguments {
  const int32_t* expert_ids = nullptr;  // [pairs], below num_experts; -1: none
  int pairs = 0, num_experts = 0;       // num_experts up to kMostMoeExperts
  const int32_t* num_pairs = nullptr;   // on the device: how many pairs there are; null: all
  int tile_units = 0;                   // units of kExpertRowUnit rows in a row tile, at most
  int32_t* positions = nullptr;         // [pairs]: sorted row of each; -1: none
  ExpertRowTile* row_tiles = nullptr;   // by expert
  int32_t* num_row_tiles = nullptr;
  int32_t* tiles_taken = nullptr;  // [2], one for each GEMM: zeroed
};
void sort_by_expert(const SortByExpertArguments& arguments, GpuStream stream);

// Copies x's rows, and their scales if present, to their places among the sorted rows. The next
// launch may begin when sort_by_expert() has ended, so it can read sort's lists at once.
struct GatherRowsArguments {
  const void* x = nullptr;  // [rows, vectors] of 16 bytes
  void* sorted_x = nullptr;
  const float* scales = nullptr;  // [scale_blocks, rows]
  int64_t scales_stride = 0;      // to the next block's
  float* sorted_scales = nullptr;
  int64_t sorted_scales_stride = 0;
  const int32_t* positions = nullptr;  // [rows, experts_per_token]
  int rows = 0, vectors = 0, scale_blocks = 0, experts_per_token = 0;
};
void gather_rows(const GatherRowsArguments& arguments, GpuStream stream);

// out[t] = sum over t's experts of weight * results[position] in ascending order of the experts, +
// shared_results[t]; in fp32.
struct CombineExpertsArguments {
  const void* results = nullptr;         // [sorted rows, hidden] bf16
  const void* shared_results = nullptr;  // [rows, hidden] bf16 or null
  const int32_t* positions = nullptr;    // [rows, experts_per_token]
  const float* weights = nullptr;
  void* out = nullptr;  // [rows, hidden]
  DType out_type = DType::kF32;
  int rows = 0, hidden = 0, experts_per_token = 0;  // hidden a multiple of 8
};
void combine_experts(const CombineExpertsArguments& arguments, GpuStream stream);

}  // namespace fathom::cuda
