#include "cli/model_work.h"

#include <cmath>

#include "checkpoint/inventory.h"

namespace fathom {
namespace {

// Multiply-adds of one token in one layer's matrices.
double attention_macs(const ModelConfig& config) {
  const auto heads = static_cast<double>(config.num_heads);
  const auto hidden = static_cast<double>(config.hidden);
  const auto q_lora = static_cast<double>(config.q_lora_rank);
  const double q = heads * static_cast<double>(config.qk_dim());
  const double query = config.q_lora_rank > 0 ? hidden * q_lora + q_lora * q : hidden * q;
  const double kv_a = hidden * static_cast<double>(config.latent_dim());
  const double kv_b = static_cast<double>(config.kv_lora_rank) * heads *
                      static_cast<double>(config.qk_nope_dim + config.v_dim);
  return query + kv_a + kv_b + heads * static_cast<double>(config.v_dim) * hidden;
}

double feed_forward_macs(const ModelConfig& config, int64_t layer) {
  const auto hidden = static_cast<double>(config.hidden);
  if (!config.is_moe_layer(layer)) return 3 * hidden * static_cast<double>(config.intermediate);
  const auto used = static_cast<double>(config.experts_per_token + config.num_shared_experts);
  return 3 * hidden * static_cast<double>(config.moe_intermediate) * used +
         hidden * static_cast<double>(config.num_experts);
}

}  // namespace

double decode_step_bytes(const Checkpoint& checkpoint, CacheFormat cache_format, int64_t batch,
                         double context) {
  const ModelConfig& config = checkpoint.config();
  const Inventory inventory = take_inventory(checkpoint);
  const auto sequences = static_cast<double>(batch);
  double bytes = 0;
  for (int i = 0; i < kNumWeightGroups; ++i) {
    const auto group = static_cast<WeightGroup>(i);
    auto stored = static_cast<double>(inventory.groups[static_cast<size_t>(i)].bytes);
    if (group == WeightGroup::kMtp) continue;
    if (group == WeightGroup::kEmbedding) {
      stored *= std::min(1.0, sequences / static_cast<double>(config.vocab_size));
    }
    if (group == WeightGroup::kExperts && config.num_experts > 0) {
      const double chosen =
          static_cast<double>(config.experts_per_token) / static_cast<double>(config.num_experts);
      stored *= 1 - std::pow(1 - chosen, sequences);
    }
    bytes += stored;
  }
  const LatentLayout layout{cache_format, config.kv_lora_rank, config.qk_rope_dim};
  return bytes + sequences * context * static_cast<double>(layout.row_bytes()) *
                     static_cast<double>(config.num_layers);
}

double prefill_flops(const ModelConfig& config, int64_t prompt_tokens) {
  const auto tokens = static_cast<double>(prompt_tokens);
  double macs_a_token = 0;
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    macs_a_token += attention_macs(config) + feed_forward_macs(config, layer);
  }
  const double pairs = tokens * (tokens + 1) / 2;  // causal
  const double attention = pairs * static_cast<double>(config.num_heads) *
                           static_cast<double>(config.qk_dim() + config.v_dim) *
                           static_cast<double>(config.num_layers);
  const double head = static_cast<double>(config.vocab_size) * static_cast<double>(config.hidden);
  return 2 * (tokens * macs_a_token + attention + head);
}

}  // namespace fathom
