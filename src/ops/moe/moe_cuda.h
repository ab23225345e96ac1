// The mixture of experts on a Hopper GPU:
//
//   out[t] = mlp_shared(x[t]) + sum over t's experts e of weight * mlp_e(x[t])
//   mlp(x) = down( silu(gate x) * (up x) )
//
// The same operation as moe (ops/moe/moe.h), but out is written, not added to. bf16 products summed
// in fp32; activations are rounded to bf16. Which experts a token has is known only on the device:
// the host plans for the shape and the number of rows alone.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tensor/dtype.h"

namespace fathom::cuda {

struct MoeShape {
  int32_t hidden = 0;       // a multiple of 64
  int32_t num_experts = 0;  // up to 256
  int32_t experts_per_token = 0;
  int32_t inter = 0;         // of an expert, a multiple of 64
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
  // [kMoeProgressWords], zero before the first launch, left as later ones want it: one for all
  // launches that never run at the same time.
  uint64_t* progress = nullptr;
  // A row's bits are the same whatever the other rows are and however many: few rows take the
  // launches of many.
  bool batch_invariant = false;
};

// Enough for any number of rows up to `rows`.
int64_t moe_workspace_bytes(const MoeShape& shape, int32_t rows);

// Enqueues a few launches; nothing for no rows. Weights may be read before earlier launches have
// ended: no launch of the same stream may be writing them. The same arguments give the same bits.
void moe(const MoeArguments& arguments, cudaStream_t stream);

}  // namespace fathom::cuda
