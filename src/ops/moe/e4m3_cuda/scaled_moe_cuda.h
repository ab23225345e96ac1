// The mixture of experts in e4m3 with block-wise scales on a Hopper GPU:
//
//   out[t] = mlp_shared(x[t]) + sum over t's experts e of weight * mlp_e(x[t])
//   mlp(x) = down( quantized( silu(gate x) * (up x) ) )
//
// GEMMs are those of scaled_linear_cuda.h. The activations between them are quantized from fp32 as
// in quantize_rows.h, by blocks of 128 intermediate columns. Experts' results are added up in fp32,
// in a fixed order; out is written, not added to. A token's experts are known only on the device:
// the host plans for the shape and the number of rows alone.
#pragma once

#include <cstdint>

#include "device/cuda/gpu_stream.h"
#include "ops/moe/bf16_cuda/moe_cuda.h"
#include "ops/scaled_linear/quantize_rows.h"

namespace fathom::cuda {

inline constexpr int kScaledMoeProgressWords = 8192;

// All pointers are device memory, aligned to 16 bytes; matrices and scales are dense but for x's
// scales. shape.hidden, inter and shared_inter are multiples of 128.
struct ScaledMoeArguments {
  MoeShape shape;
  int32_t rows = 0;
  const void* x = nullptr;                // [rows, hidden] e4m3
  const float* x_scales = nullptr;        // [hidden / 128, rows]
  int64_t x_scales_stride = 0;            // a multiple of 4
  const int32_t* expert_ids = nullptr;    // [rows, experts_per_token], distinct; -1: none (padding)
  const float* expert_weights = nullptr;  // [rows, experts_per_token]
  const void* gate_up = nullptr;          // [num_experts, 2 * inter, hidden] e4m3: gate, then up
  const float* gate_up_scales = nullptr;  // [num_experts, 2 * inter / 128, hidden / 128]
  const void* down = nullptr;             // [num_experts, hidden, inter] e4m3
  const float* down_scales = nullptr;     // [num_experts, hidden / 128, inter / 128]
  const void* shared_gate_up = nullptr;   // [2 * shared_inter, hidden] e4m3
  const float* shared_gate_up_scales = nullptr;
  const void* shared_down = nullptr;  // [hidden, shared_inter] e4m3
  const float* shared_down_scales = nullptr;
  void* out = nullptr;  // [rows, hidden] bf16 or f32
  DType out_type = DType::kF32;
  void* workspace = nullptr;  // scaled_moe_workspace_bytes(), aligned to 1024; no contents kept
  // [kScaledMoeProgressWords]. Zero it before the first launch; the launches leave it ready for
  // later ones. Launches that never overlap can share it.
  uint64_t* progress = nullptr;
  ScaleForm form = ScaleForm::kF32;  // scales of the activations between the GEMMs
  // Batch-invariant: a row's result is bitwise independent of the other rows and their number,
  // because few rows take the launches of many.
  bool batch_invariant = false;
  // Number of CTAs of the few-row launches; must be the same for all launches that share
  // `progress`.
  SmBudget budget = DeviceContext::current().budget();
};

// Enough for any number of rows up to `rows`.
int64_t scaled_moe_workspace_bytes(const MoeShape& shape, int32_t rows);

// Enqueues a few launches; none for zero rows. Weights may be read before earlier launches have
// ended (PDL), so no launch of the same stream may be writing them. Results are deterministic.
void scaled_moe(const ScaledMoeArguments& arguments, GpuStream stream);

}  // namespace fathom::cuda
