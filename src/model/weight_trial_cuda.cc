#include "model/weight_trial_cuda.h"

#include <fmt/format.h>

#include <random>

#include "checkpoint/safetensors.h"

namespace fathom::cuda {

std::string config_text(const Sizes& s, const std::string& quantization) {
  return fmt::format(
      R"({{"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"],
"vocab_size": 96, "hidden_size": {}, "intermediate_size": {}, "moe_intermediate_size": {},
"num_hidden_layers": 2, "num_nextn_predict_layers": 0, "num_attention_heads": {},
"num_key_value_heads": {}, "n_shared_experts": 2, "n_routed_experts": {}, "num_experts_per_tok": 2,
"n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
"norm_topk_prob": true, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1,
"moe_layer_freq": 1, "q_lora_rank": {}, "kv_lora_rank": {}, "qk_nope_head_dim": {},
"qk_rope_head_dim": 64, "v_head_dim": {}, "hidden_act": "silu", "rms_norm_eps": 1e-6,
"rope_theta": 10000, "max_position_embeddings": 4096, "attention_bias": false,
"tie_word_embeddings": false, "torch_dtype": "bfloat16"{}}})",
      s.hidden, s.dense, s.width, s.heads, s.heads, s.experts,
      s.q_lora > 0 ? std::to_string(s.q_lora) : "null", s.latent, s.nope, s.v,
      quantization.empty() ? "" : ", \"quantization_config\": " + quantization);
}

namespace {

// Random numbers of a type.
std::string random_bytes(DType type, int64_t count, bool scale, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::string data;
  for (int64_t i = 0; i < count; ++i) {
    const float value =
        scale ? 0.01f + 0.001f * static_cast<float>(random() % 100) : normal(random);
    if (type == DType::kF32) data += bytes_of(std::vector<float>{value});
    if (type == DType::kBF16) data += bytes_of(std::vector<bf16>{to_bf16(value)});
    if (type == DType::kF16) data += bytes_of(std::vector<f16>{to_f16(value)});
    if (type == DType::kF8E4M3) data += bytes_of(std::vector<e4m3>{to_e4m3(40 * value)});
    if (type == DType::kF8E8M0) data += static_cast<char>(110 + random() % 20);
  }
  return data;
}

}  // namespace

Checkpoint write_checkpoint(const TestFolder& folder, const std::string& config, DType wide) {
  folder.write("config.json", config);
  const auto shape = Checkpoint::open_dummy(folder.path());
  FATHOM_CHECK(shape.has_value(), "{}", shape.error().message);
  std::mt19937 random(7);
  std::vector<TestTensor> tensors;
  for (const auto& [name, entry] : shape->tensors()) {
    int64_t count = 1;
    for (const int64_t size : entry.shape) count *= size;
    const bool scale = name.find("scale") != std::string::npos;
    DType type = entry.dtype == DType::kBF16 ? wide : entry.dtype;
    if (scale && config.find("ue8m0") != std::string::npos) type = DType::kF8E8M0;
    auto stored_shape = entry.shape;
    // The published shape.
    if (name.ends_with("input_scale")) stored_shape.clear();
    tensors.push_back({name, std::string(published_name(type)), stored_shape,
                       random_bytes(type, count, scale, random)});
  }
  folder.write("model.safetensors", shard_of(tensors));
  auto opened = Checkpoint::open(folder.path());
  FATHOM_CHECK(opened.has_value(), "{}", opened.error().message);
  return std::move(*opened);
}

Result<ModelWeights> load_rank(const Checkpoint& checkpoint, const ModelSpec& spec,
                               StoredFp8 stored_fp8, const LoadOptions& options) {
  const WeightForms forms(checkpoint, stored_fp8, options);
  const auto types = layer_forms(spec, forms);
  const WeightsOfRank rank = {spec, types, DeviceContext::current()};
  FATHOM_TRY(auto weights, load_weights(checkpoint, {&rank, 1}, options));
  return std::move(weights.front());
}

Result<ModelWeights> load_whole(const Checkpoint& checkpoint, StoredFp8 stored_fp8,
                                const LoadOptions& options) {
  return load_rank(checkpoint, make_spec(checkpoint.config()), stored_fp8, options);
}

int64_t bytes_of_whole(const Checkpoint& checkpoint, StoredFp8 stored_fp8,
                       const LoadOptions& options) {
  const ModelSpec spec = make_spec(checkpoint.config());
  return weight_bytes(spec, layer_forms(spec, WeightForms(checkpoint, stored_fp8, options)));
}

}  // namespace fathom::cuda
