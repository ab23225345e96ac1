// The names of a DeepSeek-family checkpoint's tensors, as published on Hugging Face.
#pragma once

#include <string_view>

namespace fathom::tensor_names {

inline constexpr std::string_view kEmbedding = "model.embed_tokens.weight";
inline constexpr std::string_view kFinalNorm = "model.norm.weight";
inline constexpr std::string_view kHead = "lm_head.weight";

// After "model.layers.7.".
inline constexpr std::string_view kInputNorm = "input_layernorm.weight";
inline constexpr std::string_view kPostAttentionNorm = "post_attention_layernorm.weight";
inline constexpr std::string_view kQ = "self_attn.q_proj.weight";  // without query compression
inline constexpr std::string_view kQA = "self_attn.q_a_proj.weight";
inline constexpr std::string_view kQANorm = "self_attn.q_a_layernorm.weight";
inline constexpr std::string_view kQB = "self_attn.q_b_proj.weight";
inline constexpr std::string_view kKvA = "self_attn.kv_a_proj_with_mqa.weight";
inline constexpr std::string_view kKvANorm = "self_attn.kv_a_layernorm.weight";
inline constexpr std::string_view kKvB = "self_attn.kv_b_proj.weight";
inline constexpr std::string_view kO = "self_attn.o_proj.weight";
// Grouped-query attention has these instead of the latent's.
inline constexpr std::string_view kK = "self_attn.k_proj.weight";
inline constexpr std::string_view kV = "self_attn.v_proj.weight";
// With attention_bias.
inline constexpr std::string_view kQBias = "self_attn.q_proj.bias";
inline constexpr std::string_view kQBBias = "self_attn.q_b_proj.bias";
inline constexpr std::string_view kKvABias = "self_attn.kv_a_proj_with_mqa.bias";
inline constexpr std::string_view kKBias = "self_attn.k_proj.bias";
inline constexpr std::string_view kVBias = "self_attn.v_proj.bias";
inline constexpr std::string_view kOBias = "self_attn.o_proj.bias";
// The indexer's, of a model with sparse attention.
inline constexpr std::string_view kIndexQ = "self_attn.indexer.wq_b.weight";
inline constexpr std::string_view kIndexK = "self_attn.indexer.wk.weight";
inline constexpr std::string_view kIndexKNorm = "self_attn.indexer.k_norm.weight";
inline constexpr std::string_view kIndexKNormBias = "self_attn.indexer.k_norm.bias";
inline constexpr std::string_view kIndexWeights = "self_attn.indexer.weights_proj.weight";
inline constexpr std::string_view kMlp = "mlp.";  // a dense layer's
inline constexpr std::string_view kRouter = "mlp.gate.weight";
inline constexpr std::string_view kRouterBias = "mlp.gate.e_score_correction_bias";
inline constexpr std::string_view kSharedExperts = "mlp.shared_experts.";
inline constexpr std::string_view kExperts = "mlp.experts.";  // then "7."

// After one of the prefixes of a feed-forward block.
inline constexpr std::string_view kGateProj = "gate_proj.weight";
inline constexpr std::string_view kUpProj = "up_proj.weight";
inline constexpr std::string_view kDownProj = "down_proj.weight";

// Instead of ".weight": the scale of a GEMM's x, with static quantization.
inline constexpr std::string_view kInputScale = ".input_scale";

// An MTP layer has these besides those of a layer with routed experts.
inline constexpr std::string_view kMtpEmbeddingNorm = "enorm.weight";
inline constexpr std::string_view kMtpHiddenNorm = "hnorm.weight";
inline constexpr std::string_view kMtpProjection = "eh_proj.weight";  // [embedding ; hidden]
// Copies of the main model's, where they are there at all.
inline constexpr std::string_view kMtpEmbedding = "embed_tokens.weight";
inline constexpr std::string_view kMtpHead = "shared_head.head.weight";
inline constexpr std::string_view kMtpHeadNorm = "shared_head.norm.weight";

inline constexpr std::string_view kLayers = "model.layers.";  // then "7."

}  // namespace fathom::tensor_names
