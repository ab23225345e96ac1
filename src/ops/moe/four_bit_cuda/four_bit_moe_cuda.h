// The mixture of experts on a Hopper GPU with routed experts in four bits:
//
//   out[t] = addend[t] + sum over t's experts e of weight * down_e( silu(gate_e x[t]) * (up_e x[t])
//   )
//
// Weights are codes with bf16 scales for 32 columns of a row (plans/four_bit_tiles.h). The shared
// expert is not four bits: its result is `addend`. Codes become bf16 exactly; sums are fp32.
#pragma once

#include <cstdint>

#include "device/cuda/gpu_stream.h"
#include "ops/moe/bf16_cuda/moe_cuda.h"
#include "ops/moe/plans/four_bit_moe_plan.h"
#include "tensor/dtype.h"
#include "tensor/scaled_matrix.h"

namespace fathom::cuda {

// All pointers are device memory, aligned to 16 bytes.
struct FourBitMoeArguments {
  // hidden, inter: multiples of 64, up to kFourBitMostColumns. shared_inter is not used.
  MoeShape shape;
  FourBitCode code = FourBitCode::kInteger;  // of both matrices
  int32_t rows = 0;
  const void* x = nullptr;                // [rows, hidden] bf16
  const int32_t* expert_ids = nullptr;    // [rows, experts_per_token], distinct; -1: none (padding)
  const float* expert_weights = nullptr;  // [rows, experts_per_token]
  const void* gate_up = nullptr;          // [num_experts] of [2 * inter, hidden], rows in turn
  const void* down = nullptr;             // [num_experts] of [hidden, inter]
  const void* addend = nullptr;           // [rows, hidden] bf16; null: none
  void* out = nullptr;                    // [rows, hidden] bf16 or f32
  DType out_type = DType::kF32;
  void* workspace = nullptr;  // aligned to 1024; no contents kept
  // A row's bits do not depend on the number of rows: all take the launches of many.
  bool batch_invariant = false;
};

// Enough for any number of rows up to `rows`.
int64_t four_bit_moe_workspace_bytes(const MoeShape& shape, int32_t rows);

// Enqueues a few launches; none for zero rows. Weights may be read before earlier launches have
// ended (PDL), so no launch of the same stream may be writing them. Results are deterministic.
void four_bit_moe(const FourBitMoeArguments& arguments, GpuStream stream);

// ---- few rows: up to kFourBitFewPairs pairs. Three launches, bandwidth-bound up to 8 rows an
// expert. A row's bits do not depend on the other rows.

int64_t four_bit_moe_few_rows_workspace_bytes(const MoeShape& shape, int32_t rows);
void four_bit_moe_few_rows(const FourBitMoeArguments& arguments, GpuStream stream);

// ---- many rows. Five launches. A row's bits do not depend on the other rows.

int64_t four_bit_moe_many_rows_workspace_bytes(const MoeShape& shape, int32_t rows);
void four_bit_moe_many_rows(const FourBitMoeArguments& arguments, GpuStream stream);

}  // namespace fathom::cuda
