#include "model/token_work.h"

#include <algorithm>

namespace fathom {
namespace {

double attention_macs(const ModelConfig& config, int64_t layer) {
  const auto heads = static_cast<double>(config.num_heads);
  const auto hidden = static_cast<double>(config.hidden);
  const auto q_lora = static_cast<double>(config.q_lora_rank);
  const double q = heads * static_cast<double>(config.qk_dim());
  const double query = config.q_lora_rank > 0 ? hidden * q_lora + q_lora * q : hidden * q;
  const double kv_a = hidden * static_cast<double>(config.latent_dim());
  const double kv_b = config.gqa ? 0
                                 : static_cast<double>(config.kv_lora_rank) * heads *
                                       static_cast<double>(config.qk_nope_dim + config.v_dim);
  double indexer = 0;
  if (config.has_indexer(layer)) {
    const auto index_heads = static_cast<double>(config.indexer->num_heads);
    const auto dim = static_cast<double>(config.indexer->head_dim);
    indexer = q_lora * index_heads * dim + hidden * (dim + index_heads);
  }
  return query + kv_a + kv_b + heads * static_cast<double>(config.v_dim) * hidden + indexer;
}

double feed_forward_macs(const ModelConfig& config, int64_t layer) {
  const auto hidden = static_cast<double>(config.hidden);
  if (!config.is_moe_layer(layer)) return 3 * hidden * static_cast<double>(config.intermediate);
  const auto used = static_cast<double>(config.experts_per_token + config.num_shared_experts);
  return 3 * hidden * static_cast<double>(config.moe_intermediate) * used +
         hidden * static_cast<double>(config.num_experts);
}

}  // namespace

double token_macs(const ModelConfig& config) {
  double macs = 0;
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    macs += attention_macs(config, layer) + feed_forward_macs(config, layer);
  }
  return macs;
}

double mha_key_macs(const ModelConfig& config) {
  return static_cast<double>(config.num_layers * config.num_heads) *
         static_cast<double>(config.qk_dim() + config.v_dim);
}

double absorbed_key_macs(const ModelConfig& config) {
  return static_cast<double>(config.num_layers * config.num_heads) *
         static_cast<double>(config.latent_dim() + config.kv_lora_rank);
}

double index_key_macs(const ModelConfig& config) {
  if (!config.indexer) return 0;
  return static_cast<double>(config.num_indexers() * config.indexer->num_heads *
                             config.indexer->head_dim);
}

int64_t keys_worth_a_row(const ModelConfig& config, double key_macs) {
  return std::max<int64_t>(1, static_cast<int64_t>(token_macs(config) / key_macs));
}

}  // namespace fathom
