#include "checkpoint/other_architectures.h"

#include <algorithm>
#include <span>

namespace fathom {
namespace {

constexpr std::string_view kKnownTypes[] = {
    "deepseek_v2",   "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25", "glm_moe_dsa",
    "glm4_moe_lite", "youtu",       "youtu_llm",    "llama",   "mistral",  "qwen2"};
// With grouped-query attention. Fields do not tell these from their relatives, which scale
// embeddings or norm queries, so the type does.
constexpr std::string_view kGroupedQueryTypes[] = {"llama", "mistral", "qwen2"};

// A field that is there (and not null), and what it stands for.
struct ForeignPart {
  std::string_view field, meaning;
};
constexpr ForeignPart kParts[] = {
    {"linear_attn_config", "layers of linear attention"},      // Kimi-Linear, Kimi K3
    {"linear_head_dim", "layers of linear attention"},         // the same, by transformers; GLM-5.3
    {"short_conv_kernel_size", "layers of linear attention"},  // Ling 3
    {"hc_mult", "hyper-connections between residual streams"},  // DeepSeek-V4, GLM-5.3, Hy4
    {"compress_ratios", "attention to compressed keys"},        // DeepSeek-V4
    {"compress_rates", "attention to compressed keys"},         // the same, by transformers
    {"swiglu_limit", "clamped feed-forward activations"},
    {"zero_expert_num", "experts that return their input"},  // LongCat-Flash
    {"mla_scale_q_lora", "scaled latents"},                  // LongCat-Flash
    {"scale_depth", "scaled residuals"},                     // MiniCPM3
    {"scale_emb", "scaled embeddings"},                      // MiniCPM3
    {"gated_norm_rank", "gated norms"},                      // A.X-K2
    {"no_rope_layers", "layers without rotation"},           // Mistral Large 4
    {"kv_source_layers", "layers that share keys"},          // Mistral Large 4
    {"final_logit_softcapping", "capped logits"},            // Mistral Large 4
    {"index_kpool", "an indexer over pools of keys"},        // GLM-5.3
    {"num_local_experts", "experts under other names"},      // Mixtral
};
// In Llama's form: Mistral 7B v0.1 has a window; Qwen2 names one that it does not use.
constexpr ForeignPart kWindow[] = {{"sliding_window", "a window of attention"}};
constexpr ForeignPart kUsedWindow[] = {{"use_sliding_window", "a window of attention"}};
// Inside rope_scaling or rope_parameters: Mistral Large 3 and Small 4 scale queries by position.
constexpr ForeignPart kRopeParts[] = {
    {"llama_4_scaling_beta", "queries scaled by their position"},
    {"llama_4_scaling", "queries scaled by their position"},
};
constexpr std::string_view kLayerTypes[] = {"full_attention", "indexed_attention"};

bool is_false(const json::value& value) { return value.is_bool() && !value.get_bool(); }

Result<> check_parts(const JsonFields& fields, std::span<const ForeignPart> parts,
                     const std::string& where) {
  for (const ForeignPart& part : parts) {
    const json::value* value = fields.find(part.field);
    if (value == nullptr || is_false(*value)) continue;
    return invalid("{}{} is {}: models with {} are not supported", where, part.field, brief(*value),
                   part.meaning);
  }
  return {};
}

Result<> check_layer_types(const JsonFields& fields, const std::string& where) {
  const json::value* types = fields.find("layer_types");
  if (types == nullptr || !types->is_array()) return {};
  for (const json::value& item : types->get_array()) {
    const bool known = item.is_string() && std::find(std::begin(kLayerTypes), std::end(kLayerTypes),
                                                     item.get_string()) != std::end(kLayerTypes);
    if (known) continue;
    return invalid("{}layer_types holds {}; supported are full_attention and indexed_attention",
                   where, brief(item));
  }
  return {};
}

}  // namespace

bool is_known_model_type(std::string_view model_type) {
  return std::find(std::begin(kKnownTypes), std::end(kKnownTypes), model_type) !=
         std::end(kKnownTypes);
}

Result<> check_architecture(const JsonFields& fields, std::string_view model_type,
                            const std::string& where) {
  FATHOM_RETURN_IF_ERROR(check_parts(fields, kParts, where));
  for (const std::string key : {"rope_parameters", "rope_scaling"}) {
    const json::value* rope = fields.find(key);
    if (rope == nullptr || !rope->is_object()) continue;
    const JsonFields inner(rope->get_object(), where + key + ".");
    FATHOM_RETURN_IF_ERROR(check_parts(inner, kRopeParts, where + key + "."));
  }
  FATHOM_RETURN_IF_ERROR(check_layer_types(fields, where));
  if (fields.has("kv_lora_rank")) return {};
  if (!is_grouped_query(fields, model_type)) {
    return invalid(
        "{}kv_lora_rank is missing: model_type {:?} has no multi-head latent attention, and of "
        "those without it llama, mistral and qwen2 are supported",
        where, model_type.substr(0, 60));
  }
  if (fields.has("use_sliding_window")) return check_parts(fields, kUsedWindow, where);
  return check_parts(fields, kWindow, where);
}

bool is_grouped_query(const JsonFields& fields, std::string_view model_type) {
  return !fields.has("kv_lora_rank") &&
         std::find(std::begin(kGroupedQueryTypes), std::end(kGroupedQueryTypes), model_type) !=
             std::end(kGroupedQueryTypes);
}

}  // namespace fathom
