#include "model/workspace.h"

#include <algorithm>

#include "base/math.h"
#include "model/layer_options.h"
#include "ops/attention/attention.h"
#include "ops/attention/sparse_attention.h"
#include "ops/draft_head/draft_head.h"
#include "ops/indexer/index_scores.h"
#include "ops/indexer/top_keys.h"
#include "ops/moe/moe.h"

namespace fathom {

namespace {

// The widest of the rank's routed experts, shared expert and dense layers; 0 where it has none.
struct Widths {
  int64_t expert = 0, shared = 0, dense = 0;

  explicit Widths(const ModelSpec& spec) {
    for (const LayerSpec& layer : spec.layers) add(layer);
    for (const MtpSpec& mtp : spec.mtp) add(mtp.layer);
  }
  void add(const LayerSpec& layer) {
    if (layer.dense) dense = std::max(dense, layer.dense->width());
    if (!layer.moe) return;
    for (const MlpSpec& mlp : layer.moe->experts) expert = std::max(expert, mlp.width());
    if (layer.moe->shared) shared = std::max(shared, layer.moe->shared->width());
  }
};

// Sizes of the indexer's buffers; all 0 for a model without one.
struct IndexerSizes {
  int64_t dim = 0, heads = 0, topk = 0, score_floats = 0, scratch = 0, attention_scratch = 0;

  IndexerSizes(const ModelSpec& spec, const AttentionPolicy& policy, int64_t rows, int64_t group,
               int num_threads) {
    const ModelConfig& config = spec.config;
    const auto limits = sparse_limits(config, policy);
    if (!limits) return;
    dim = config.indexer->head_dim;
    heads = config.indexer->num_heads;
    topk = limits->top_keys;
    score_floats = score_buffer_floats(*limits, rows, config.max_position);
    scratch = std::max(index_scores_workspace_bytes(rows, heads, dim, num_threads),
                       top_keys_workspace_bytes(config.max_position, num_threads));
    attention_scratch = sparse_attention_workspace_bytes(
        group, spec.num_heads(), config.kv_lora_rank, num_threads, config.qk_rope_dim);
  }
};

}  // namespace

Result<Workspace> Workspace::allocate(const ModelSpec& spec, DType operand, int64_t max_rows,
                                      const AttentionPolicy& policy, int num_threads) {
  const ModelConfig& config = spec.config;
  const Widths widths(spec);
  Workspace w;
  w.operand = operand;
  const int64_t rows = max_rows, heads = spec.num_heads(), hidden = config.hidden;
  const int64_t latent = config.kv_lora_rank, rope = config.qk_rope_dim;
  const int64_t group = std::min(rows, policy.max_absorbed_rows);
  const int64_t chunk = policy.mha_key_chunk;
  const IndexerSizes index(spec, policy, rows, group, num_threads);
  const int64_t op = size_of(operand);
  const int64_t mtp_layers = std::ssize(spec.mtp), mtp_rows = mtp_layers > 0 ? rows : 0;
  // Where tokens are exchanged, only the shared expert and MTP layers are computed here; what comes
  // for the rank's slots is in the exchange's own memory.
  const bool routed =
      config.num_experts > 0 && (!spec.placement.exchanges_tokens() || mtp_layers > 0);
  const int64_t moe =
      !routed ? mlp_workspace_bytes(rows, hidden, widths.shared)
              : moe_workspace_bytes(rows, hidden, config.num_experts, config.experts_per_token,
                                    widths.expert, widths.shared);
  const std::pair<Buffer*, int64_t> sizes[] = {
      {&w.residual, rows * hidden * 4},
      {&w.normed, rows * hidden * op},
      {&w.normed_f32, operand == DType::kF32 ? 0 : rows * hidden * 4},
      {&w.partial, spec.placement.tp > 1 ? rows * hidden * 4 : 0},
      {&w.hidden, mtp_rows * hidden * op},
      {&w.mtp_hidden, std::max(mtp_rows * hidden * op, draft_scratch_bytes(mtp_rows, hidden))},
      {&w.mtp_state, mtp_layers * rows * hidden * op},
      {&w.q_a, rows * config.q_lora_rank * 4},
      {&w.q_a_normed, rows * config.q_lora_rank * op},
      {&w.kv_a, rows * (latent + rope) * 4},
      {&w.q, rows * heads * config.qk_dim() * 4},
      {&w.q_nope, rows * heads * config.qk_nope_dim * op},
      {&w.q_rope, rows * heads * rope * op},
      {&w.heads_out, rows * heads * config.v_dim * op},
      {&w.index_k, rows * index.dim * 4},
      {&w.index_q, rows * index.heads * index.dim * 4},
      {&w.index_queries, rows * index.heads * index.dim * 4},
      {&w.index_head_weights, rows * index.heads * 4},
      {&w.index_weights, rows * index.heads * 4},
      {&w.index_scores, index.score_floats * 4},
      {&w.key_lists, rows * index.topk * 4},
      {&w.indexer, index.scratch},
      {&w.q_latent, group * heads * latent * op},
      {&w.o_latent, group * heads * latent * op},
      {&w.absorbed,
       std::max(absorbed_attention_workspace_bytes(group, heads, latent, num_threads, rope),
                index.attention_scratch)},
      {&w.latent, chunk * latent * op},
      {&w.k_rope, chunk * rope * op},
      {&w.kv, chunk * heads * (config.qk_nope_dim + config.v_dim) * op},
      {&w.part, rows * heads * config.v_dim * 4},
      {&w.part_lse, rows * heads * 4},
      {&w.whole, rows * heads * config.v_dim * 4},
      {&w.whole_lse, rows * heads * 4},
      {&w.mha, mha_attention_workspace_bytes(heads, config.qk_dim(), config.v_dim, num_threads)},
      {&w.router_logits, rows * config.num_experts * 4},
      {&w.expert_ids, rows * config.experts_per_token * 4},
      {&w.expert_weights, rows * config.experts_per_token * 4},
      {&w.mlp, std::max(moe, mlp_workspace_bytes(rows, hidden, widths.dense))},
  };
  for (const auto& [buffer, bytes] : sizes) {
    FATHOM_TRY(*buffer, Buffer::allocate(bytes, "activations (--max-num-batched-tokens)"));
  }
  return w;
}

int64_t Workspace::bytes() const {
  int64_t total = 0;
  for (const Buffer* buffer : {&residual,
                               &normed,
                               &normed_f32,
                               &partial,
                               &hidden,
                               &mtp_hidden,
                               &mtp_state,
                               &q_a,
                               &q_a_normed,
                               &kv_a,
                               &q,
                               &q_nope,
                               &q_rope,
                               &heads_out,
                               &index_k,
                               &index_q,
                               &index_queries,
                               &index_head_weights,
                               &index_weights,
                               &index_scores,
                               &key_lists,
                               &indexer,
                               &q_latent,
                               &o_latent,
                               &absorbed,
                               &latent,
                               &k_rope,
                               &kv,
                               &part,
                               &part_lse,
                               &whole,
                               &whole_lse,
                               &mha,
                               &router_logits,
                               &expert_ids,
                               &expert_weights,
                               &mlp}) {
    total += buffer->size();
  }
  return total;
}

}  // namespace fathom
