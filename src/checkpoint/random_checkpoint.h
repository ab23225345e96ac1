// Random checkpoints of any configuration, for tests: bf16, reproducible.
#pragma once

#include <numeric>
#include <string>

#include "base/check.h"
#include "checkpoint/dummy_weights.h"
#include "checkpoint/test_files.h"
#include "checkpoint/weight_names.h"

namespace fathom {

// A small model of DeepSeek-V3's form whose matrices have whole groups of 32 and, with a width of
// 128 or more, of 128 columns.
inline std::string small_v3_config(int64_t width) {
  return fmt::format(R"({{
  "model_type": "deepseek_v3", "vocab_size": 131, "hidden_size": {0}, "num_hidden_layers": 3,
  "first_k_dense_replace": 1, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
  "num_attention_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32,
  "qk_rope_head_dim": 16, "v_head_dim": 32, "rope_theta": 10000, "intermediate_size": 128,
  "moe_intermediate_size": {0}, "n_routed_experts": 8, "num_experts_per_tok": 3,
  "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc",
  "scoring_func": "sigmoid", "norm_topk_prob": true, "routed_scaling_factor": 1.5,
  "torch_dtype": "bfloat16"
}}
)",
                     width);
}

// Writes config.json and model.safetensors with the configuration's unquantized weights.
inline void write_random_checkpoint(const std::string& config_text, const TestFolder& folder,
                                    const std::string& name) {
  const auto config = parse_model_config(config_text, "config.json");
  FATHOM_CHECK(config.has_value(), "{}", config.error().message);
  std::vector<TestTensor> tensors;
  WeightNames(*config).for_each([&](const PublishedTensor& tensor) {
    const int64_t count =
        std::accumulate(tensor.shape.begin(), tensor.shape.end(), int64_t{1}, std::multiplies<>());
    std::string data(static_cast<size_t>(count * size_of(tensor.dtype)), '\0');
    fill_dummy(tensor.name, tensor.dtype, tensor.shape.back(), 1,
               std::as_writable_bytes(std::span(data)));
    tensors.push_back(
        {tensor.name, tensor.dtype == DType::kF32 ? "F32" : "BF16", tensor.shape, std::move(data)});
    return true;
  });
  folder.write(name + "/config.json", config_text);
  folder.write(name + "/model.safetensors", shard_of(tensors));
}

}  // namespace fathom
