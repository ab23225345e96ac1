#include "cli/model_work.h"

#include <algorithm>
#include <cmath>

#include "checkpoint/inventory.h"
#include "model/layer_options.h"
#include "model/token_work.h"

namespace fathom {

double decode_step_bytes(const Checkpoint& checkpoint, const LoadOptions& load,
                         CacheFormat cache_format, int64_t batch, double context) {
  const ModelConfig& config = checkpoint.config();
  const Inventory inventory = take_loaded_inventory(checkpoint, load);
  const auto sequences = static_cast<double>(batch);
  double unread_experts = 0;  // the share of them that no token selects
  if (config.num_experts > 0) {
    const double chosen =
        static_cast<double>(config.experts_per_token) / static_cast<double>(config.num_experts);
    unread_experts = std::pow(1 - chosen, sequences);
  }
  double bytes = 0;
  for (int i = 0; i < kNumWeightGroups; ++i) {
    const auto group = static_cast<WeightGroup>(i);
    auto stored = static_cast<double>(inventory.groups[static_cast<size_t>(i)].bytes);
    if (group == WeightGroup::kMtp) continue;
    if (group == WeightGroup::kEmbedding) {
      stored *= std::min(1.0, sequences / static_cast<double>(config.vocab_size));
    }
    if (group == WeightGroup::kExperts) stored *= 1 - unread_experts;
    if (group == WeightGroup::kScales) {
      stored -= unread_experts * static_cast<double>(inventory.expert_scale_bytes);
    }
    bytes += stored;
  }
  double read = context, index_bytes = 0;
  if (config.indexer && context > static_cast<double>(config.indexer->topk)) {
    read = static_cast<double>(config.indexer->topk);
    index_bytes = context * static_cast<double>(index_key_bytes(config, cache_format)) *
                  static_cast<double>(config.num_indexers());
  }
  const double latent_bytes = read *
                              static_cast<double>(latent_layout(config, cache_format).row_bytes()) *
                              static_cast<double>(config.num_layers);
  return bytes + sequences * (latent_bytes + index_bytes);
}

double prefill_flops(const ModelConfig& config, int64_t prompt_tokens) {
  const auto tokens = static_cast<double>(prompt_tokens);
  const double causal = tokens * (tokens + 1) / 2;
  double pairs = causal, index_pairs = 0;
  if (config.indexer && prompt_tokens > config.indexer->topk) {
    const auto topk = static_cast<double>(config.indexer->topk);
    const double dense = topk * (topk + 1) / 2;
    pairs = dense + (tokens - topk) * topk;
    index_pairs = causal - dense;
  }
  const double head = static_cast<double>(config.vocab_size) * static_cast<double>(config.hidden);
  return 2 * (tokens * token_macs(config) + pairs * mha_key_macs(config) +
              index_pairs * index_key_macs(config) + head);
}

}  // namespace fathom
