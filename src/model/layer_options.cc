#include "model/layer_options.h"

#include <algorithm>

#include "base/math.h"

namespace fathom {
namespace {

constexpr int64_t kScoreUnit = 16;  // ScorePass rounds its columns up to this

}  // namespace

std::optional<SparseLimits> sparse_limits(const ModelConfig& config,
                                          const AttentionPolicy& policy) {
  if (!config.indexer) return std::nullopt;
  SparseLimits limits;
  limits.top_keys = config.indexer->topk;
  limits.dense_keys = policy.dense_keys.value_or(limits.top_keys);
  // A row's scores are all there before its keys are chosen.
  limits.score_bytes = std::max(limits.score_bytes, round_up(config.max_position, kScoreUnit) * 4);
  return limits;
}

std::optional<YarnParameters> yarn_parameters(const ModelConfig& config) {
  if (!config.yarn) return std::nullopt;
  return YarnParameters{config.yarn->factor,    config.yarn->beta_fast,
                        config.yarn->beta_slow, config.yarn->original_max_position,
                        config.yarn->mscale,    config.yarn->mscale_all_dim};
}

RopeTable rope_table(const ModelConfig& config) {
  std::optional<Llama3Parameters> llama3;
  if (config.llama3) {
    llama3 = {config.llama3->factor, config.llama3->low_freq_factor,
              config.llama3->high_freq_factor, config.llama3->original_max_position};
  }
  RopeTable table =
      make_rope_table(config.rope_table_dim(), config.rope_theta, yarn_parameters(config), llama3);
  if (config.gqa) table.pairs = RopePairs::kHalves;
  return table;
}

GateOptions gate_options(const ModelConfig& config) {
  GateOptions options;
  switch (config.gate) {
    case GateKind::kSoftmaxGreedy:
      options.scoring = GateScoring::kSoftmaxGreedy;
      break;
    case GateKind::kSoftmaxGroupLimited:
      options.scoring = GateScoring::kSoftmaxGroupLimited;
      break;
    case GateKind::kSigmoidBias:
      options.scoring = GateScoring::kSigmoidBias;
      break;
  }
  options.num_groups = config.num_groups;
  options.groups_per_token = config.groups_per_token;
  options.experts_per_token = config.experts_per_token;
  options.normalize = config.normalize_weights;
  options.scaling = static_cast<float>(config.routed_scaling);
  return options;
}

LatentLayout latent_layout(const ModelConfig& config, CacheFormat format) {
  return {format, config.kv_lora_rank, config.qk_rope_dim};
}

std::optional<IndexKeyLayout> index_key_layout(const ModelConfig& config, CacheFormat format) {
  if (!config.indexer) return std::nullopt;
  const bool exact = format == CacheFormat::kF32;
  return IndexKeyLayout{exact ? IndexKeyFormat::kF32 : IndexKeyFormat::kE4M3,
                        config.indexer->head_dim};
}

int64_t index_key_bytes(const ModelConfig& config, CacheFormat format) {
  const auto layout = index_key_layout(config, format);
  return layout ? layout->row_bytes() : 0;
}

std::vector<bool> layers_with_index_keys(const ModelConfig& config, int64_t cache_layers) {
  std::vector<bool> layers;
  for (int64_t layer = 0; layer < cache_layers; ++layer) {
    layers.push_back(config.has_indexer(layer));
  }
  return layers;
}

int64_t cache_token_bytes(const ModelConfig& config, CacheFormat format) {
  return config.num_layers * latent_layout(config, format).row_bytes() +
         config.num_indexers() * index_key_bytes(config, format);
}

}  // namespace fathom
