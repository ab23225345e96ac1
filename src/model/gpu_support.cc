#include "model/gpu_support.h"

#include <string>

#include "base/math.h"
#include "model/kept_states.h"
#include "model/layer_options.h"
#include "ops/attention/attention_support.h"
#include "ops/gate/gate_support.h"
#include "ops/indexer/indexer_support.h"
#include "ops/linear/linear_support.h"
#include "ops/moe/moe_support.h"
#include "ops/rms_norm/rms_norm_support.h"
#include "ops/sampling/sample_support.h"

namespace fathom {
namespace {

constexpr int64_t kLogitUnit = 8;

Result<> attention(const ModelSpec& spec) {
  const ModelConfig& config = spec.config;
  const NamedSize hidden{"hidden_size", config.hidden};
  const NamedSize nope{"qk_nope_head_dim", config.qk_nope_dim}, v{"v_head_dim", config.v_dim};
  const NamedSize latent{"kv_lora_rank", config.kv_lora_rank};
  FATHOM_RETURN_IF_ERROR(
      cuda::absorbed_attention_supports(latent, {"qk_rope_head_dim", config.qk_rope_dim}));
  // Rows of prompts that see all keys are few where others choose theirs.
  if (!config.indexer) {
    FATHOM_RETURN_IF_ERROR(cuda::multi_head_attention_supports(nope, v));
  }
  const NamedSize query{"num_attention_heads * (qk_nope_head_dim + qk_rope_head_dim)",
                        spec.num_heads() * config.qk_dim()};
  const NamedSize heads_out{"num_attention_heads * v_head_dim", spec.num_heads() * config.v_dim};
  if (config.q_lora_rank > 0) {
    const NamedSize q_lora{"q_lora_rank", config.q_lora_rank};
    FATHOM_RETURN_IF_ERROR(cuda::linear_supports(q_lora, hidden));
    FATHOM_RETURN_IF_ERROR(cuda::rms_norm_supports(q_lora));
    FATHOM_RETURN_IF_ERROR(cuda::linear_supports(query, q_lora));
  } else {
    FATHOM_RETURN_IF_ERROR(cuda::linear_supports(query, hidden));
  }
  FATHOM_RETURN_IF_ERROR(cuda::linear_supports(latent, nope));  // the absorption of W_UK
  FATHOM_RETURN_IF_ERROR(cuda::linear_supports(v, latent));     // of W_UV
  return cuda::linear_supports(hidden, heads_out);
}

// What kernels for GPUs do not compute, whatever the widths.
Result<> attention_form(const ModelConfig& config) {
  if (config.gqa) {
    return invalid(
        "config.json: num_key_value_heads is {}: grouped-query attention runs on the CPU alone "
        "(--device cpu); `fathom convert --to mla` makes a model of latent attention of it",
        config.gqa->kv_heads);
  }
  if (!config.latent_norm) {
    return invalid(
        "config.json: qk_latent_layernorm is false: models without a norm on the latent run on the "
        "CPU alone (--device cpu)");
  }
  if (config.has_qkv_bias) {
    return invalid(
        "config.json: attention_bias is true: models with biases run on the CPU alone (--device "
        "cpu)");
  }
  if (config.rope_heads != 1) {
    return invalid("config.json: qk_rope_heads is {}: GPUs take 1 (--device cpu)",
                   config.rope_heads);
  }
  return {};
}

// Sparse attention: the indexer's sizes, and the forms of it that are there.
Result<> indexer(const ModelSpec& spec) {
  const ModelConfig& config = spec.config;
  if (!config.indexer) return {};
  const IndexerConfig& index = *config.indexer;
  FATHOM_RETURN_IF_ERROR(
      cuda::indexer_supports({.heads = {"index_n_heads", index.num_heads},
                              .dim = {"index_head_dim", index.head_dim},
                              .length = {"max_position_embeddings", config.max_position}}));
  if (!index.shared.empty()) {
    return invalid(
        "indexer_types: layers that attend to the keys that another layer chose; on GPUs each "
        "layer "
        "chooses its own so far");
  }
  FATHOM_RETURN_IF_ERROR(
      cuda::linear_supports({"index_n_heads", index.num_heads}, {"hidden_size", config.hidden}));
  return cuda::linear_supports({"index_n_heads * index_head_dim", index.num_heads * index.head_dim},
                               {"q_lora_rank", config.q_lora_rank});
}

Result<> feed_forward(const ModelConfig& config) {
  const NamedSize hidden{"hidden_size", config.hidden};
  FATHOM_RETURN_IF_ERROR(cuda::moe_supports(hidden, {"", 1}));  // a dense layer: one expert
  if (config.num_experts == 0) return {};
  const NamedSize experts{"n_routed_experts", config.num_experts};
  const bool grouped = config.gate != GateKind::kSoftmaxGreedy;
  FATHOM_RETURN_IF_ERROR(
      cuda::gate_supports({.hidden = hidden,
                           .experts = experts,
                           .experts_per_token = {"num_experts_per_tok", config.experts_per_token},
                           .groups = {"n_group", grouped ? config.num_groups : 1}}));
  return cuda::moe_supports(hidden, experts);
}

// Symmetric codes, contiguous groups. What is not kept in four bits is dequantized to bf16.
Result<> four_bits(const QuantizationConfig& quantization) {
  using Kind = QuantizationConfig::Kind;
  const auto refused = [](std::string_view what) {
    return invalid(
        "config.json: quantization_config.{}, which runs on the CPU alone so far (--device cpu)",
        what);
  };
  switch (quantization.kind) {
    case Kind::kAwq:
      return refused("quant_method is awq");
    case Kind::kGptq:
      return refused("quant_method is gptq");
    case Kind::kNvfp4:
      return refused("format is nvfp4-pack-quantized");
    case Kind::kPackedInt4:
      if (!quantization.symmetric) return refused("config_groups.weights.symmetric is false");
      return {};
    default:
      return {};
  }
}

// Layers with index keys; the MTP layer chooses its own keys.
int64_t num_index_keys(const ModelConfig& config, bool with_mtp) {
  return config.num_indexers() + (with_mtp && config.indexer ? 1 : 0);
}

}  // namespace

int64_t gpu_logit_columns(const ModelSpec& spec) {
  return round_up(spec.vocabulary().count, kLogitUnit);
}

int64_t gpu_page_stride(const ModelConfig& config, CacheFormat format, bool with_mtp) {
  const int64_t part = latent_layout(config, format).page_bytes();
  const int64_t parts = gpu_page_parts(config.num_layers, config.hidden, part, with_mtp);
  const auto index_keys = index_key_layout(config, format);
  if (!index_keys) return parts;
  // One byte more, so that no page is as long as one of a CPU, whose index keys lie in another
  // order.
  const int64_t tail = num_index_keys(config, with_mtp) * index_keys->page_bytes() + 1;
  return parts + ceil_div(tail, part);
}

int64_t gpu_page_rest(const ModelConfig& config, CacheFormat format, bool with_mtp) {
  const int64_t part = latent_layout(config, format).page_bytes();
  const int64_t latents = config.num_layers + (with_mtp ? 1 : 0);
  return (gpu_page_stride(config, format, with_mtp) - latents) * part -
         num_index_keys(config, with_mtp) * index_key_bytes(config, format) * kPageSize;
}

bool gpu_takes_multi_head(const ModelConfig& config) {
  return cuda::multi_head_attention_supports({"", config.qk_nope_dim}, {"", config.v_dim})
      .has_value();
}

Result<> gpu_supports(const ModelSpec& spec, CacheFormat cache_format) {
  const ModelConfig& config = spec.config;
  if (cache_format == CacheFormat::kF32) {
    return invalid("--kv-cache-dtype is float32; kernels for GPUs take bf16 and forms of 8 bits");
  }
  FATHOM_RETURN_IF_ERROR(four_bits(config.quantization));
  FATHOM_RETURN_IF_ERROR(attention_form(config));
  const auto sizes = [&]() -> Result<> {
    const NamedSize hidden{"hidden_size", config.hidden};
    const NamedSize vocab{"vocab_size", config.vocab_size};
    FATHOM_RETURN_IF_ERROR(cuda::rms_norm_supports(hidden));
    FATHOM_RETURN_IF_ERROR(cuda::sample_supports(vocab));
    FATHOM_RETURN_IF_ERROR(attention(spec));
    FATHOM_RETURN_IF_ERROR(indexer(spec));
    FATHOM_RETURN_IF_ERROR(feed_forward(config));
    if (!spec.mtp.empty()) {
      FATHOM_RETURN_IF_ERROR(cuda::linear_supports(hidden, {"2 * hidden_size", 2 * config.hidden}));
    }
    return cuda::linear_supports({"vocab_size, padded", gpu_logit_columns(spec)}, hidden);
  };
  if (const auto supported = sizes(); !supported) {
    return tl::unexpected(with_context("config.json: ", supported.error()));
  }
  return {};
}

}  // namespace fathom
