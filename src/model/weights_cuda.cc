#include "model/weights_cuda.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>

#include "model/gpu_support.h"
#include "model/weight_collector_cuda.h"

namespace fathom::cuda {
namespace {

void collect_attention(const ModelConfig& config, const std::string& prefix,
                       WeightCollector& collect, LayerWeights* out) {
  const int64_t hidden = config.hidden, q_rows = config.num_heads * config.qk_dim();
  const bool compressed = config.q_lora_rank > 0;
  const MatrixPart kv_a{prefix + "kv_a_proj_with_mqa.weight", config.latent_dim()};
  if (compressed) {
    const MatrixPart q_a{prefix + "q_a_proj.weight", config.q_lora_rank};
    collect.matrix({q_a, kv_a}, hidden, &out->q_kv_a);
    collect.vector(prefix + "q_a_layernorm.weight", config.q_lora_rank, &out->q_a_norm);
    collect.matrix({{prefix + "q_b_proj.weight", q_rows}}, config.q_lora_rank, &out->q_b);
  } else {
    collect.matrix({{prefix + "q_proj.weight", q_rows}, kv_a}, hidden, &out->q_kv_a);
  }
  collect.vector(prefix + "kv_a_layernorm.weight", config.kv_lora_rank, &out->kv_a_norm);
  collect.kv_b(prefix + "kv_b_proj.weight", config, out);
  collect.matrix({{prefix + "o_proj.weight", hidden}}, config.num_heads * config.v_dim, &out->o);
}

void collect_moe(const ModelConfig& config, const std::string& prefix, WeightCollector& collect,
                 LayerWeights* out) {
  const int64_t hidden = config.hidden, width = config.moe_intermediate;
  const int64_t shared_width = config.num_shared_experts * width;
  const auto routed = [&](int64_t e) { return fmt::format("{}experts.{}.", prefix, e); };
  const auto shared = [&](int64_t) { return prefix + "shared_experts."; };
  collect.router(prefix + "gate.weight", config.num_experts, hidden, out);
  if (config.gate == GateKind::kSigmoidBias) {
    collect.vector(prefix + "gate.e_score_correction_bias", config.num_experts, &out->gate_bias);
  }
  // One launch takes both.
  DType type = collect.forms().mlps(routed, config.num_experts, hidden).type;
  if (shared_width > 0 && collect.forms().mlps(shared, 1, hidden).type != type) {
    type = DType::kBF16;
  }
  collect.mlps(routed, config.num_experts, hidden, width, type, &out->experts);
  if (shared_width > 0) collect.mlps(shared, 1, hidden, shared_width, type, &out->shared);
}

void collect_dense(const ModelConfig& config, const std::string& prefix, WeightCollector& collect,
                   LayerWeights* out) {
  const auto only = [&](int64_t) { return prefix; };
  const DType type = collect.forms().mlps(only, 1, config.hidden).type;
  collect.mlps(only, 1, config.hidden, config.intermediate, type, &out->dense);
}

void collect_model(const ModelConfig& config, WeightCollector& collect, ModelWeights* out) {
  collect.table("model.embed_tokens.weight", config.vocab_size, config.hidden, config.vocab_size,
                &out->embedding);
  out->layers.resize(static_cast<size_t>(config.num_layers));
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    const std::string prefix = fmt::format("model.layers.{}.", layer);
    LayerWeights* const weights = &out->layers[static_cast<size_t>(layer)];
    collect.vector(prefix + "input_layernorm.weight", config.hidden, &weights->input_norm);
    collect.vector(prefix + "post_attention_layernorm.weight", config.hidden,
                   &weights->post_attention_norm);
    collect_attention(config, prefix + "self_attn.", collect, weights);
    const auto feed_forward = config.is_moe_layer(layer) ? collect_moe : collect_dense;
    feed_forward(config, prefix + "mlp.", collect, weights);
  }
  collect.vector("model.norm.weight", config.hidden, &out->final_norm);
  collect.table("lm_head.weight", config.vocab_size, config.hidden, gpu_logit_columns(config),
                &out->head);
}

// Routed and shared experts have the same x, which is quantized once.
void share_input_scales(ModelWeights& weights) {
  for (LayerWeights& layer : weights.layers) {
    float& routed = layer.experts.gate_up.input_scale;
    float& shared = layer.shared.gate_up.input_scale;
    routed = shared = std::max(routed, shared);
  }
}

}  // namespace

int64_t weight_bytes(const Checkpoint& checkpoint, StoredFp8 stored_fp8,
                     const LoadOptions& options) {
  ModelWeights weights;
  WeightCollector collect(checkpoint, stored_fp8, options);
  collect_model(checkpoint.config(), collect, &weights);
  return collect.bytes();
}

Result<ModelWeights> load_weights(const Checkpoint& checkpoint, StoredFp8 stored_fp8,
                                  const LoadOptions& options) {
  // Fields point into it until the load has ended.
  const auto weights = std::make_unique<ModelWeights>();
  WeightCollector collect(checkpoint, stored_fp8, options);
  collect_model(checkpoint.config(), collect, weights.get());
  FATHOM_TRY(weights->memory, collect.load());
  share_input_scales(*weights);
  return std::move(*weights);
}

}  // namespace fathom::cuda
