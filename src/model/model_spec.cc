#include "model/model_spec.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "checkpoint/tensor_names.h"
#include "model/forward_batch.h"
#include "placement/split.h"

namespace fathom {
namespace {

using namespace tensor_names;

class SpecMaker {
 public:
  // `table`: null without an exchange of tokens.
  SpecMaker(const ModelConfig& config, const Placement& placement, int rank,
            const ExpertTable* table)
      : config_(config),
        ranks_(placement.tp),
        rank_(placement.tp_rank_of(rank)),
        world_rank_(rank),
        table_(table) {}

  TensorPart vector(std::string name, int64_t size) const {
    return {std::move(name), 1, size, {0, 1}, {0, size}, true};
  }
  TensorPart rows(std::string name, int64_t num_rows, int64_t num_cols, Slice rows) const {
    return {std::move(name), num_rows, num_cols, rows, {0, num_cols}};
  }
  TensorPart columns(std::string name, int64_t num_rows, int64_t num_cols, Slice cols) const {
    return {std::move(name), num_rows, num_cols, {0, num_rows}, cols};
  }
  TensorPart whole(std::string name, int64_t num_rows, int64_t num_cols) const {
    return rows(std::move(name), num_rows, num_cols, {0, num_rows});
  }

  // The rank's columns of a block.
  MlpSpec mlp(const std::string& prefix, int64_t width) const {
    return mlp(prefix, width, split_columns(width, ranks_, rank_));
  }
  MlpSpec mlp(const std::string& prefix, int64_t width, Slice inner) const {
    const auto named = [&](std::string_view name) { return fmt::format("{}{}", prefix, name); };
    return {rows(named(kGateProj), width, config_.hidden, inner),
            rows(named(kUpProj), width, config_.hidden, inner),
            columns(named(kDownProj), config_.hidden, width, inner)};
  }

  AttentionSpec attention(const std::string& prefix, bool has_indexer) const {
    const auto named = [&](std::string_view name) { return fmt::format("{}{}", prefix, name); };
    const int64_t hidden = config_.hidden, heads = config_.num_heads, qk = config_.qk_dim();
    const int64_t kv = config_.qk_nope_dim + config_.v_dim;
    AttentionSpec spec;
    spec.heads = split_heads(config_, ranks_, rank_);
    const auto of_heads = [&](int64_t size) {
      return Slice{spec.heads.first * size, spec.heads.count * size};
    };
    if (config_.q_lora_rank > 0) {
      spec.q_a = whole(named(kQA), config_.q_lora_rank, hidden);
      if (config_.latent_norm) spec.q_a_norm = vector(named(kQANorm), config_.q_lora_rank);
      spec.q_b = rows(named(kQB), heads * qk, config_.q_lora_rank, of_heads(qk));
    } else {
      spec.q_b = rows(named(kQ), heads * qk, hidden, of_heads(qk));
    }
    if (config_.gqa) {
      spec.kv_a = whole(named(kV), config_.kv_lora_rank, hidden);
      spec.k = whole(named(kK), config_.qk_rope_dim, hidden);
    } else {
      spec.kv_a = whole(named(kKvA), config_.latent_dim(), hidden);
      if (config_.latent_norm) spec.kv_a_norm = vector(named(kKvANorm), config_.kv_lora_rank);
      spec.kv_b = rows(named(kKvB), heads * kv, config_.kv_lora_rank, of_heads(kv));
    }
    if (config_.has_qkv_bias) {
      spec.q_bias = vector(named(config_.q_lora_rank > 0 ? kQBBias : kQBias), heads * qk);
      spec.q_bias->cols = of_heads(qk);
      spec.kv_a_bias = vector(named(config_.gqa ? kVBias : kKvABias), spec.kv_a.num_rows);
      if (config_.gqa) spec.k_bias = vector(named(kKBias), config_.qk_rope_dim);
    }
    if (config_.has_o_bias) spec.o_bias = vector(named(kOBias), hidden);
    spec.o = columns(named(kO), hidden, heads * config_.v_dim, of_heads(config_.v_dim));
    if (has_indexer) spec.indexer = indexer(prefix, *config_.indexer);
    return spec;
  }

  IndexerSpec indexer(const std::string& prefix, const IndexerConfig& sizes) const {
    const auto named = [&](std::string_view name) { return fmt::format("{}{}", prefix, name); };
    const int64_t hidden = config_.hidden, dim = sizes.head_dim;
    return {.q = whole(named(kIndexQ), sizes.num_heads * dim, config_.q_lora_rank),
            .k = whole(named(kIndexK), dim, hidden),
            .k_norm = vector(named(kIndexKNorm), dim),
            .k_norm_bias = vector(named(kIndexKNormBias), dim),
            .weights = whole(named(kIndexWeights), sizes.num_heads, hidden)};
  }

  // `number` counts layers with routed experts.
  MoeSpec moe(const std::string& prefix, int64_t number) const {
    MoeSpec spec;
    spec.router = whole(fmt::format("{}{}", prefix, kRouter), config_.num_experts, config_.hidden);
    if (config_.gate == GateKind::kSigmoidBias) {
      spec.router_bias = vector(fmt::format("{}{}", prefix, kRouterBias), config_.num_experts);
    }
    const int64_t width = config_.moe_intermediate;
    const int64_t shared_width = config_.num_shared_experts * width;
    const auto expert = [&](int64_t e) { return fmt::format("{}{}{}.", prefix, kExperts, e); };
    const std::string shared = fmt::format("{}{}", prefix, kSharedExperts);
    if (table_ != nullptr && number < table_->num_layers()) {
      for (const int32_t e : table_->experts_of(number, world_rank_)) {
        spec.experts.push_back(mlp(expert(e), width, {0, width}));
      }
      if (shared_width > 0) spec.shared = mlp(shared, shared_width, {0, shared_width});
      return spec;
    }
    for (int64_t e = 0; e < config_.num_experts; ++e) spec.experts.push_back(mlp(expert(e), width));
    if (shared_width > 0) spec.shared = mlp(shared, shared_width);
    return spec;
  }

  // `moe_number`: how many layers before this one have routed experts.
  LayerSpec layer(int64_t number, int64_t moe_number) const {
    const std::string prefix = fmt::format("{}{}.", kLayers, number);
    const auto named = [&](std::string_view name) { return fmt::format("{}{}", prefix, name); };
    LayerSpec spec;
    spec.input_norm = vector(named(kInputNorm), config_.hidden);
    spec.post_attention_norm = vector(named(kPostAttentionNorm), config_.hidden);
    spec.attention = attention(prefix, config_.has_indexer(number));
    if (config_.is_moe_layer(number)) {
      spec.moe = moe(prefix, moe_number);
    } else {
      spec.dense = mlp(named(kMlp), config_.intermediate);
    }
    return spec;
  }

  // `moe_number` as layer() has it.
  MtpSpec mtp(int64_t number, int64_t moe_number) const {
    const std::string prefix = fmt::format("{}{}.", kLayers, config_.num_layers + number);
    const auto named = [&](std::string_view name) { return fmt::format("{}{}", prefix, name); };
    const int64_t hidden = config_.hidden;
    const auto half = [&](int64_t first) {
      return columns(named(kMtpProjection), hidden, 2 * hidden, {first, hidden});
    };
    return {vector(named(kMtpEmbeddingNorm), hidden),
            vector(named(kMtpHiddenNorm), hidden),
            vector(named(kMtpHeadNorm), hidden),
            half(0),
            half(hidden),
            layer(config_.num_layers + number, moe_number)};
  }

 private:
  const ModelConfig& config_;
  const int ranks_, rank_;  // of the lane
  const int world_rank_;
  const ExpertTable* const table_;
};

}  // namespace

ModelSpec make_spec(const ModelConfig& config, const Placement& placement, int rank,
                    std::shared_ptr<const ExpertTable> table, int64_t mtp_layers) {
  const bool exchanges = placement.exchanges_tokens();
  FATHOM_CHECK(rank >= 0 && rank < placement.world() && (table != nullptr || !exchanges),
               "rank {} of {}", rank, placement.world());
  if (!exchanges) table = nullptr;
  const SpecMaker make(config, placement, rank, table.get());
  ModelSpec spec;
  spec.expert_table = std::move(table);
  spec.config = config;
  spec.placement = placement;
  spec.rank = rank;
  const Slice vocabulary =
      split_vocabulary(config.vocab_size, placement.tp, placement.tp_rank_of(rank));
  spec.embedding = make.rows(std::string(kEmbedding), config.vocab_size, config.hidden, vocabulary);
  const std::string_view head = config.tied_embeddings ? kEmbedding : kHead;
  spec.head = make.rows(std::string(head), config.vocab_size, config.hidden, vocabulary);
  spec.final_norm = make.vector(std::string(kFinalNorm), config.hidden);
  int64_t moe_layers = 0;
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    spec.layers.push_back(make.layer(layer, moe_layers));
    if (spec.layers.back().moe) ++moe_layers;
  }
  const int64_t main_moe_layers = moe_layers;
  FATHOM_CHECK(mtp_layers == 0 || mtp_layers <= std::min(config.num_mtp_layers, kMaxDrafts),
               "{} of {} MTP layers", mtp_layers, config.num_mtp_layers);
  for (int64_t i = 0; i < mtp_layers; ++i) {
    spec.mtp.push_back(make.mtp(i, moe_layers));
    if (spec.mtp.back().layer.moe) ++moe_layers;
  }
  const int64_t in_table = exchanges ? spec.expert_table->num_layers() : 0;
  FATHOM_CHECK(!exchanges || in_table == main_moe_layers || in_table == moe_layers,
               "{} layers with experts and {} with the MTP layers', the table has {}",
               main_moe_layers, moe_layers, in_table);
  return spec;
}

TensorPart MtpSpec::projection() const {
  TensorPart both = from_embedding;
  both.cols = {from_embedding.cols.first, from_embedding.cols.count + from_hidden.cols.count};
  return both;
}

const MlpSpec& ModelSpec::expert(int64_t moe_layer, size_t slot) const {
  size_t layer = 0;
  for (int64_t seen = -1; (seen += layers[layer].moe ? 1 : 0) < moe_layer; ++layer) {
    FATHOM_CHECK(layer + 1 < layers.size(), "layer {} with experts of {}", moe_layer, seen + 1);
  }
  return layers[layer].moe->experts[slot];
}

ModelSpec make_spec(const ModelConfig& config, int64_t mtp_layers) {
  return make_spec(config, Placement{}, 0, nullptr, mtp_layers);
}

int64_t num_drafting_layers(const ModelConfig& config, int64_t max_drafts) {
  return std::min(config.num_mtp_layers, max_drafts);
}

}  // namespace fathom
