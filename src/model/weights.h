// A rank's weights in memory, and their loading from a checkpoint.
//
// Owned by the model; read-only after load_weights(). Sizes are those of the rank's part. An MTP
// layer's tensors are loaded unless the main model has them.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "checkpoint/load_plan.h"
#include "model/model_spec.h"
#include "ops/draft_head/draft_head.h"
#include "ops/linear/packed_matrix.h"
#include "ops/moe/moe.h"

namespace fathom {

// Chooses each row's keys (DeepSeek-V3.2, 2025).
struct IndexerWeights {
  PackedMatrix q;              // [index heads * index dim, q_lora]
  PackedMatrix k;              // [index dim, hidden]
  Buffer k_norm, k_norm_bias;  // [index dim] f32
  PackedMatrix weights;        // [index heads, hidden], multiplied in fp32
};

// Multi-head latent attention, section 2.1 of DeepSeek-V2 (2024). H heads.
struct AttentionWeights {
  Buffer q_a_norm;    // [q_lora] f32; empty without query compression and without latent_norm
  PackedMatrix q_a;   // [q_lora, hidden]; empty without query compression
  PackedMatrix q_b;   // [H * (nope + rope), q_lora], or q_proj [.., hidden]
  PackedMatrix kv_a;  // [latent + rope, hidden]; with grouped queries v_proj: [latent, hidden]
  PackedMatrix k;     // k_proj [rope, hidden]; with grouped queries alone
  Buffer kv_a_norm;   // [latent] f32; empty without latent_norm
  // f32, empty where the model has none: of q_b [H * (nope + rope)], kv_a, k and o [hidden].
  Buffer q_bias, kv_a_bias, k_bias, o_bias;
  // The following three are empty with grouped queries.
  PackedMatrix kv_b;  // [H * (nope + v), latent]: expands the latent for the multi-head form
  std::vector<PackedMatrix> uk;  // [H] of [latent, nope]: W_UK transposed, takes q into the latent
  std::vector<PackedMatrix> uv;  // [H] of [v, latent]: takes the latent output back
  PackedMatrix o;                // [hidden, H * v]
  std::optional<IndexerWeights> indexer;  // with sparse attention
};

struct MoeWeights {
  PackedMatrix gate;                 // [experts, hidden], multiplied in fp32
  Buffer gate_bias;                  // [experts] f32; empty unless the gate has one
  std::vector<MlpWeights> experts;   // as in the spec
  std::optional<MlpWeights> shared;  // num_shared * moe_intermediate wide
};

struct LayerWeights {
  Buffer input_norm;  // [hidden] f32
  AttentionWeights attention;
  Buffer post_attention_norm;       // [hidden] f32
  std::optional<MlpWeights> dense;  // exactly one of the two
  std::optional<MoeWeights> moe;
};

struct MtpWeights {
  Buffer embedding_norm, hidden_norm, head_norm;  // [hidden] f32
  PackedMatrix from_embedding, from_hidden;       // [hidden, hidden]
  LayerWeights layer;
};

struct ModelWeights {
  Buffer embedding;  // [vocab, hidden] bf16 or f32
  DType embedding_dtype = DType::kBF16;
  std::vector<LayerWeights> layers;
  Buffer final_norm;            // [hidden] f32
  PackedMatrix head;            // [vocab, hidden]
  DraftHead draft_head;         // the same, for MTP layers that compute in bf16; else empty
  std::vector<MtpWeights> mtp;  // as in the spec

  // Bytes of this rank's weights; shared ones count for each rank.
  int64_t bytes() const;
};

// A norm's weight or a bias, [size] f32.
inline ConstTensorView norm_weight(const Buffer& buffer) {
  return buffer.view(DType::kF32, {buffer.size() / 4});
}

// The weights of some ranks of this process. Each tensor is read once; what ranks hold alike exists
// once. compute is kBF16 or kF32: the type of the GEMMs' x. With kF32 the stored values are kept
// exactly; with kBF16 f16 and f32 matrices are rounded to bf16, FP8 ones stay FP8.
Result<std::vector<ModelWeights>> load_weights(const Checkpoint& checkpoint,
                                               std::span<const ModelSpec> specs, DType compute,
                                               const LoadOptions& options);

// The weights of some blocks alone, in this order.
Result<std::vector<MlpWeights>> load_mlps(const Checkpoint& checkpoint,
                                          std::span<const MlpSpec> specs, DType compute,
                                          const LoadOptions& options);

}  // namespace fathom
