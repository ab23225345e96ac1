// SwiGLU feed-forward blocks: the dense one and the mixture of experts.
//
//   mlp(x) = down( silu(gate x) * (up x) )
//   moe(x) = sum over the token's experts of weight * mlp_expert(x)  +  mlp_shared(x)
//
// out is f32 and is added to (the residual stream), one expert after the other: the token's experts
// in ascending order of their number, the shared expert last. A row's result is therefore bitwise
// independent of the batch, of the order of its expert list, and of the threads.
#pragma once

#include <span>

#include "device/stream.h"
#include "ops/linear/packed_matrix.h"
#include "tensor/tensor_view.h"

namespace fathom {

struct MlpWeights {
  PackedMatrix gate_up;  // [2 * intermediate, hidden]: gate's rows, then up's
  PackedMatrix down;     // [hidden, intermediate]
};

// Bytes of workspace for up to `rows` tokens; its start must be aligned to 64 bytes.
int64_t mlp_workspace_bytes(int64_t rows, int64_t hidden, int64_t intermediate);
int64_t moe_workspace_bytes(int64_t rows, int64_t hidden, int64_t num_experts,
                            int64_t experts_per_token, int64_t expert_intermediate,
                            int64_t shared_intermediate);

// x [rows, hidden] bf16 or f32; out [rows, hidden] f32, added to.
void mlp(const Stream& stream, ConstTensorView x, const MlpWeights& weights, TensorView out,
         std::span<std::byte> workspace);

// expert_ids [rows, k] i32, each below experts.size(), expert_weights [rows, k] f32; shared may be
// null. All experts have the same shape; the shared one may be wider.
void moe(const Stream& stream, ConstTensorView x, ConstTensorView expert_ids,
         ConstTensorView expert_weights, std::span<const MlpWeights> experts,
         const MlpWeights* shared, TensorView out, std::span<std::byte> workspace);

// moe() in two parts, for experts on several ranks: the outputs of single experts, and their sum.
// Together they give moe()'s bits wherever the outputs were computed.

// Bytes of workspace for up to `pairs` pairs; its start must be aligned to 64 bytes.
int64_t expert_outputs_workspace_bytes(int64_t pairs, int64_t num_experts,
                                       int64_t expert_intermediate);

// out[i] = mlp_e(x[x_rows[i]]) with e = pair_experts[i] below experts.size(). x [any, hidden] bf16
// or f32; out [pairs, hidden] f32, overwritten. An output's bits depend on its row alone.
void expert_outputs(const Stream& stream, ConstTensorView x, std::span<const int32_t> x_rows,
                    std::span<const int32_t> pair_experts, std::span<const MlpWeights> experts,
                    TensorView out, std::span<std::byte> workspace);

struct WeightedRow {
  const float* values = nullptr;  // [hidden]
  float weight = 0;
};

// out[t] += weight * values for the `per_row` terms of row t, one after the other. terms [rows *
// per_row], out [rows, hidden] f32.
void add_expert_outputs(const Stream& stream, std::span<const WeightedRow> terms, int64_t per_row,
                        TensorView out);

}  // namespace fathom
