// A model's config.json, validated: each number is in range and consistent with the others, so
// later code need not check again.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "tensor/dtype.h"

namespace fathom {

// YaRN (Peng et al. 2023) as DeepSeek applies it; rope_scaling in config.json.
struct YarnConfig {
  double factor = 1;
  double beta_fast = 32;
  double beta_slow = 1;
  int64_t original_max_position = 4096;
  double mscale = 1;
  double mscale_all_dim = 0;
};

// Llama 3.1's scaling of rotary frequencies: rope_type "llama3".
struct Llama3RopeConfig {
  double factor = 8;
  double low_freq_factor = 1;
  double high_freq_factor = 4;
  int64_t original_max_position = 8192;
};

// Grouped-query attention (Llama, Qwen2), computed as MLA without loss: the latent is the values of
// all KV heads, the rotated key their keys. ModelConfig's widths are then
//   kv_lora_rank = qk_rope_dim = kv_heads * head_dim,  qk_nope_dim = v_dim = head_dim
// where qk_nope_dim is the width of a head's key in the multi-head form, which is rotated, too.
struct GroupedQueryConfig {
  int64_t kv_heads = 0;  // num_key_value_heads
  int64_t head_dim = 0;
};

enum class GateKind {
  kSoftmaxGreedy,        // V2-Lite: top-k of the softmax
  kSoftmaxGroupLimited,  // V2: groups by their maximum, then top-k
  kSigmoidBias,          // V3, Kimi K2 ("noaux_tc"): sigmoid, with a bias for selection only
};

// Storage format of the published weights.
struct QuantizationConfig {
  enum class Kind {
    kNone,
    kFp8Block,
    kFp8Tensor,
    kFp8Row,
    // Four bits a weight.
    kPackedInt4,  // compressed-tensors pack-quantized
    kAwq,
    kGptq,
    kMxfp4,  // compressed-tensors mxfp4-pack-quantized
    kNvfp4,  // compressed-tensors nvfp4-pack-quantized
  };
  Kind kind = Kind::kNone;
  int64_t block_rows = 0;  // kFp8Block: 128, 128
  int64_t block_cols = 0;
  bool scales_are_powers_of_two = false;  // scale_fmt "ue8m0"
  bool static_activations = false;        // activation_scheme "static": an input_scale is stored
  std::vector<std::string> ignored;       // layers that stay unquantized, as named in the config
  // Four bits.
  int64_t group_cols = 0;        // columns that share a scale; 0: the whole row
  bool symmetric = true;         // without zero points, or with the same one for all
  bool zeros_minus_one = false;  // GPTQ's first form: zero points are stored minus one
  bool act_order = false;        // GPTQ's desc_act: columns belong to groups in any order

  bool is_four_bit() const { return kind >= Kind::kPackedInt4; }
};

// The indexer of DeepSeek Sparse Attention (DeepSeek-V3.2, 2025): in each layer a row attends to
// the `topk` keys that its indexer scores highest, to all of them while it sees no more.
struct IndexerConfig {
  int64_t num_heads = 0;     // index_n_heads
  int64_t head_dim = 0;      // index_head_dim; of it the first qk_rope_dim are rotated
  int64_t topk = 0;          // index_topk
  bool interleaved = false;  // adjacent values are rotated as a pair (GLM-5), not (i, i + rope / 2)
  // [num_layers]: the layer has no indexer and attends to the keys that the last layer before it
  // with one has chosen (GLM-5.2). Empty: every layer has its own.
  std::vector<bool> shared = {};
  // A draft's later steps attend to the keys that its first step has chosen
  // (index_share_for_mtp_iteration).
  bool shares_drafts = false;
};

struct ModelConfig {
  std::string model_type;  // a label: what a model is, the fields say
  // The type is one whose tensors are all known, so one that the fields do not call for is left
  // over. In a model of another type it would be a part that is not computed.
  bool is_known_type = true;
  int64_t vocab_size = 0;
  int64_t hidden = 0;
  int64_t num_layers = 0;
  int64_t num_mtp_layers = 0;  // num_nextn_predict_layers; their ids follow num_layers
  int64_t max_position = 0;
  double rms_norm_eps = 1e-6;
  bool tied_embeddings = false;  // the head is the embedding (tie_word_embeddings)

  // Attention (MLA).
  int64_t num_heads = 0;
  int64_t q_lora_rank = 0;  // 0: q_proj without compression (V2-Lite)
  int64_t kv_lora_rank = 0;
  int64_t qk_nope_dim = 0;
  int64_t qk_rope_dim = 0;  // 0: no positions
  int64_t v_dim = 0;
  double rope_theta = 10000;
  std::optional<YarnConfig> yarn;
  std::optional<Llama3RopeConfig> llama3;
  int64_t rope_heads = 1;  // the rotated part is that of several heads, each with its own table
  // The latents of queries and keys are normed (qk_latent_layernorm); not so in a model that was
  // converted to MLA.
  bool latent_norm = true;
  bool has_qkv_bias = false;  // of q_proj (or q_b_proj) and what fills the cache
  bool has_o_bias = false;
  std::optional<GroupedQueryConfig> gqa;
  std::optional<IndexerConfig> indexer;  // with sparse attention

  // Feed-forward.
  int64_t intermediate = 0;  // dense layers
  int64_t first_dense_layers = 0;
  int64_t moe_layer_freq = 1;
  int64_t num_experts = 0;  // 0: every layer is dense
  int64_t num_shared_experts = 0;
  int64_t experts_per_token = 0;
  int64_t moe_intermediate = 0;
  int64_t num_groups = 1;
  int64_t groups_per_token = 1;
  GateKind gate = GateKind::kSoftmaxGreedy;
  bool normalize_weights = false;  // norm_topk_prob
  double routed_scaling = 1;

  DType stored_dtype = DType::kBF16;  // torch_dtype
  QuantizationConfig quantization;
  std::optional<int32_t> bos_id;
  std::vector<int32_t> eos_ids;  // config.json's; generation_config.json's override them

  // Values of a query head, as projected: nope + rope.
  int64_t qk_dim() const { return gqa ? gqa->head_dim : qk_nope_dim + qk_rope_dim; }
  // Values that the rotary table turns; the rotated part is a multiple of it.
  int64_t rope_table_dim() const { return gqa ? gqa->head_dim : qk_rope_dim / rope_heads; }
  int64_t latent_dim() const { return kv_lora_rank + qk_rope_dim; }
  bool is_moe_layer(int64_t layer) const {
    if (layer >= num_layers) return num_experts > 0;  // an MTP layer, whatever its number
    return num_experts > 0 && layer >= first_dense_layers && layer % moe_layer_freq == 0;
  }
  // Whether a layer chooses keys itself; MTP layers, whose numbers follow num_layers, always do.
  bool has_indexer(int64_t layer) const {
    if (!indexer) return false;
    return indexer->shared.empty() || layer >= num_layers ||
           !indexer->shared[static_cast<size_t>(layer)];
  }

  int64_t num_indexers() const {  // without those of MTP layers
    int64_t count = 0;
    for (int64_t layer = 0; layer < num_layers; ++layer) count += has_indexer(layer) ? 1 : 0;
    return count;
  }

  // qk_dim^-1/2, times g(mscale_all_dim)^2 with YaRN.
  double softmax_scale() const;
};

// Parses and checks the text of config.json. `source` begins each error.
Result<ModelConfig> parse_model_config(std::string_view text, std::string_view source);

}  // namespace fathom
