// The mixture of experts on a Hopper GPU:
//
//   out[t] = mlp_shared(x[t]) + sum over t's experts e of weight * mlp_e(x[t])
//   mlp(x) = down( silu(gate x) * (up x) )
//
// The same operation as moe (ops/moe/moe.h), but out is written, not added to. bf16 GEMMs
// accumulate in fp32; activations are rounded to bf16. A token's experts are known only on the
// device: the host plans for the shape and the number of rows alone.
#pragma once

#include <cstdint>

#include "device/cuda/co_resident.h"
#include "device/cuda/gpu_stream.h"
#include "ops/moe/plans/moe_few_rows_plan.h"
#include "tensor/dtype.h"

namespace fathom::cuda {

struct MoeShape {
  int32_t hidden = 0;       // a multiple of 64
  int32_t num_experts = 0;  // up to kMostMoeExperts
  int32_t experts_per_token = 0;
  int32_t inter = 0;         // of an expert; a multiple of 64
  int32_t shared_inter = 0;  // of the shared expert; 0: there is none
};

inline constexpr int kMoeProgressWords = 2;

// All pointers are device memory, aligned to 16 bytes; matrices are dense.
struct MoeArguments {
  MoeShape shape;
  int32_t rows = 0;
  const void* x = nullptr;                // [rows, hidden] bf16
  const int32_t* expert_ids = nullptr;    // [rows, experts_per_token], distinct; -1: none (padding)
  const float* expert_weights = nullptr;  // [rows, experts_per_token]
  const void* gate_up = nullptr;          // [num_experts, 2 * inter, hidden] bf16: gate, then up
  const void* down = nullptr;             // [num_experts, hidden, inter] bf16
  const void* shared_gate_up = nullptr;   // [2 * shared_inter, hidden] bf16
  const void* shared_down = nullptr;      // [hidden, shared_inter] bf16
  void* out = nullptr;                    // [rows, hidden] bf16 or f32
  DType out_type = DType::kF32;
  void* workspace = nullptr;  // moe_workspace_bytes(shape, rows), aligned to 1024; no contents kept
  // [kMoeProgressWords]. Zero it before the first launch; the launches leave it ready for later
  // ones. Launches that never overlap can share it.
  uint64_t* progress = nullptr;
  // Batch-invariant: a row's result is bitwise independent of the other rows and their number,
  // because few rows take the launches of many.
  bool batch_invariant = false;
  // Number of CTAs of the few-row launches; must be the same for all launches that share
  // `progress`.
  SmBudget budget = DeviceContext::current().budget();
};

// Enough for any number of rows up to `rows`.
int64_t moe_workspace_bytes(const MoeShape& shape, int32_t rows);

// Enqueues a few launches; none for zero rows. Weights may be read before earlier launches have
// ended (PDL), so no launch of the same stream may be writing them. Results are deterministic.
void moe(const MoeArguments& arguments, GpuStream stream);

}  // namespace fathom::cuda
