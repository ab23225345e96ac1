// Attention of DeepSeekModel: projections, its forms, and the output's sum.
#include <algorithm>
#include <cstring>

#include "model/deepseek.h"
#include "model/layer_options.h"
#include "ops/attention/attention.h"
#include "ops/attention/sparse_attention.h"
#include "ops/bias/bias.h"
#include "ops/convert/convert.h"
#include "ops/linear/linear.h"
#include "ops/rms_norm/rms_norm.h"

namespace fathom {

// residual += W_o · attention(x)
void DeepSeekModel::attention(const AttentionWeights& weights, const Step& step,
                              const LayerCache& cache, TensorView x, TensorView residual) {
  const int64_t rows = x.size(0), heads = heads_;
  const DType operand = options_.compute;
  const TensorView q = workspace_.q.view(DType::kF32, {rows, heads, config_.qk_dim()});
  project(weights, step, cache, x, q.reshape({rows, heads * config_.qk_dim()}));
  if (weights.indexer && !step.plan.scored.empty()) {
    if (step.key_sources.empty()) {
      choose_keys(*weights.indexer, step, cache.index_keys, x);
    } else {
      reuse_keys(step);
    }
  }
  rotate_queries(step, q);

  for (const AbsorbedGroup& group : step.plan.absorbed) {
    absorbed_attention(weights, step, group, cache.latent);
  }
  for (const MhaRows& some : step.plan.mha) mha_attention(weights, step, some, cache.latent);

  linear(stream_, workspace_.heads_out.view(operand, {rows, heads * config_.v_dim}), weights.o,
         part_of_sum(residual),
         lane_ == nullptr ? LinearMode::kAccumulate : LinearMode::kOverwrite);
  add_parts(step.rows, residual);
  if (weights.o_bias.size() > 0) {
    const Slice own = step.rows.own();
    add_bias(stream_, norm_weight(weights.o_bias), residual.rows(own.first, own.count));
  }
}

// With grouped queries all of a head is rotated; it stands where other models have the part that is
// not.
void DeepSeekModel::rotate_queries(const Step& step, ConstTensorView q) {
  const int64_t rows = q.size(0), heads = heads_;
  const TensorView q_nope =
      workspace_.q_nope.view(options_.compute, {rows, heads, config_.qk_nope_dim});
  const TensorView q_rope =
      workspace_.q_rope.view(options_.compute, {rows, heads, config_.qk_rope_dim});
  if (config_.gqa) {
    split_rope_query(stream_, q, step.batch.positions, rope_, q_rope.columns(0, 0), q_nope);
  } else {
    split_rope_query(stream_, q, step.batch.positions, rope_, q_nope, q_rope);
  }
}

void DeepSeekModel::add_cache_tasks(const AttentionWeights& weights, ConstTensorView x,
                                    TensorView kv_a, std::vector<LinearTask>& tasks) const {
  if (!config_.gqa) {
    tasks.push_back({x, &weights.kv_a, kv_a});
    return;
  }
  tasks.push_back({x, &weights.kv_a, kv_a.columns(0, config_.kv_lora_rank)});
  tasks.push_back({x, &weights.k, kv_a.columns(config_.kv_lora_rank, config_.qk_rope_dim)});
}

// The queries of this rank's heads, and the cache rows of all tokens.
void DeepSeekModel::project(const AttentionWeights& weights, const Step& step,
                            const LayerCache& cache, TensorView x, TensorView q) {
  const LaneRows& shares = step.rows;
  const int64_t rows = x.size(0);
  const Slice own = shares.own();
  const auto own_rows = [&](TensorView array) { return array.rows(own.first, own.count); };
  const TensorView kv_a = workspace_.kv_a.view(DType::kF32, {rows, config_.latent_dim()});
  const bool compressed = config_.q_lora_rank > 0;
  const TensorView q_a =
      compressed ? workspace_.q_a.view(DType::kF32, {rows, config_.q_lora_rank}) : TensorView();

  std::vector<LinearTask> tasks;
  if (compressed) {
    tasks.push_back({own_rows(x), &weights.q_a, own_rows(q_a)});
  } else if (!shares.are_divided()) {
    tasks.push_back({x, &weights.q_b, q});
  }
  add_cache_tasks(weights, own_rows(x), own_rows(kv_a), tasks);
  linear_group(stream_, tasks);
  TensorView q_input = x;
  if (compressed) {
    q_input = workspace_.q_a_normed.view(options_.compute, {rows, config_.q_lora_rank});
    if (config_.latent_norm) {
      rms_norm(stream_, own_rows(q_a), norm_weight(weights.q_a_norm), kInnerNormEps,
               own_rows(q_input));
    } else {
      convert(stream_, own_rows(q_a), own_rows(q_input));
    }
  }
  write_cache(weights, step, cache, own_rows(kv_a), own_rows(x));
  if (shares.are_divided()) {
    shares.gather(
        [&](int rank, std::vector<Piece>& pieces) {
          LaneRows::add_piece(q_input, shares.of(rank), pieces);
          add_cache_rows(weights, step.slots, shares.of(rank), cache, pieces);
        },
        stream_.pool());
  }
  if (compressed || shares.are_divided()) linear(stream_, q_input, weights.q_b, q);
  if (weights.q_bias.size() > 0) add_bias(stream_, norm_weight(weights.q_bias), q);
}

void DeepSeekModel::project_cache_rows(const AttentionWeights& weights, const Step& step,
                                       const LayerCache& cache, TensorView x) {
  const Slice own = step.rows.own();
  const TensorView own_x = x.rows(own.first, own.count);
  const TensorView kv_a = workspace_.kv_a.view(DType::kF32, {x.size(0), config_.latent_dim()})
                              .rows(own.first, own.count);
  std::vector<LinearTask> tasks;
  add_cache_tasks(weights, own_x, kv_a, tasks);
  linear_group(stream_, tasks);
  write_cache(weights, step, cache, kv_a, own_x);
  if (!step.rows.are_divided()) return;
  step.rows.gather(
      [&](int rank, std::vector<Piece>& pieces) {
        add_cache_rows(weights, step.slots, step.rows.of(rank), cache, pieces);
      },
      stream_.pool());
}

// The cache rows of this rank's own tokens; kv_a and x [own rows].
void DeepSeekModel::write_cache(const AttentionWeights& weights, const Step& step,
                                const LayerCache& cache, TensorView kv_a, TensorView x) {
  const Slice own = step.rows.own();
  const auto at = static_cast<size_t>(own.first), count = static_cast<size_t>(own.count);
  if (weights.kv_a_bias.size() > 0) {
    const ConstTensorView bias = norm_weight(weights.kv_a_bias);
    add_bias(stream_, bias, kv_a.columns(0, bias.size(0)));
  }
  if (weights.k_bias.size() > 0) {
    add_bias(stream_, norm_weight(weights.k_bias),
             kv_a.columns(config_.kv_lora_rank, config_.qk_rope_dim));
  }
  const ConstTensorView norm =
      config_.latent_norm ? norm_weight(weights.kv_a_norm) : ConstTensorView();
  norm_rope_cache_write(stream_, kv_a, std::span(step.batch.positions).subspan(at, count),
                        std::span(step.slots).subspan(at, count), norm, kInnerNormEps, rope_,
                        cache.latent);
  if (weights.indexer) write_keys(*weights.indexer, step, cache.index_keys, x);
}

// Appends where the cache has these rows of a step.
void DeepSeekModel::add_cache_rows(const AttentionWeights& weights, std::span<const int64_t> slots,
                                   Slice rows, const LayerCache& cache,
                                   std::vector<Piece>& pieces) {
  const auto latent_bytes = static_cast<size_t>(cache.latent.layout.row_bytes());
  for (int64_t row = rows.first; row < rows.end(); ++row) {
    const int64_t slot = slots[static_cast<size_t>(row)];
    const int64_t page = slot / kPageSize, place = slot % kPageSize;
    pieces.emplace_back(cache.latent.row(page, place), latent_bytes);
    if (!weights.indexer) continue;
    pieces.emplace_back(cache.index_keys.row(page, place),
                        static_cast<size_t>(cache.index_keys.layout.row_bytes()));
  }
}

// q_latent = W_UK q_nope. With grouped queries there is nothing to multiply with the values, and
// the rotated query goes to its KV head's place among the keys.
void DeepSeekModel::absorb_queries(const AttentionWeights& weights, ConstTensorView q_nope,
                                   TensorView q_latent, TensorView q_rope) {
  if (config_.gqa) {
    std::memset(q_latent.raw(), 0,
                static_cast<size_t>(q_latent.num_elements() * size_of(q_latent.dtype())));
    return spread_queries(stream_, grouped_, q_nope, q_rope);
  }
  std::vector<LinearTask> tasks(static_cast<size_t>(heads_));
  for (int64_t h = 0; h < heads_; ++h) {
    tasks[h] = {q_nope.select(1, h), &weights.uk[h], q_latent.select(1, h)};
  }
  linear_group(stream_, tasks);
}

void DeepSeekModel::expand_values(const AttentionWeights& weights, ConstTensorView o_latent,
                                  TensorView out) {
  if (config_.gqa) return select_values(stream_, grouped_, o_latent, out);
  std::vector<LinearTask> tasks(static_cast<size_t>(heads_));
  for (int64_t h = 0; h < heads_; ++h) {
    tasks[h] = {o_latent.select(1, h), &weights.uv[h], out.select(1, h)};
  }
  linear_group(stream_, tasks);
}

// W_UK folded into the query, attention over the latent rows, W_UV after.
void DeepSeekModel::absorbed_attention(const AttentionWeights& weights, const Step& step,
                                       const AbsorbedGroup& group, const LatentPages& pages) {
  const int64_t all_rows = step.batch.num_rows(), rows = group.rows, heads = heads_;
  const int64_t latent = config_.kv_lora_rank;
  const DType operand = options_.compute;
  const TensorView q_nope = workspace_.q_nope.view(operand, {all_rows, heads, config_.qk_nope_dim})
                                .rows(group.first_row, rows);
  const TensorView q_rope = workspace_.q_rope.view(operand, {all_rows, heads, config_.qk_rope_dim})
                                .rows(group.first_row, rows);
  const TensorView out = workspace_.heads_out.view(operand, {all_rows, heads, config_.v_dim})
                             .rows(group.first_row, rows);
  const TensorView q_latent = workspace_.q_latent.view(operand, {rows, heads, latent});
  const TensorView o_latent = workspace_.o_latent.view(operand, {rows, heads, latent});

  absorb_queries(weights, q_nope, q_latent, q_rope);
  if (!group.sequences.empty()) {
    PagedBatch paged = group.view(step.batch);
    paged.first_key = step.first_key;
    fathom::absorbed_attention(stream_, q_latent, q_rope, paged, group.sequences, pages,
                               softmax_scale_, o_latent, bytes_of(workspace_.absorbed));
  }
  if (group.scored.count > 0) {
    sparse_attention(step, group, q_latent, q_rope, pages, o_latent);
  }
  expand_values(weights, o_latent, out);
}

// The group's rows that choose their keys.
void DeepSeekModel::sparse_attention(const Step& step, const AbsorbedGroup& group,
                                     ConstTensorView q_latent, ConstTensorView q_rope,
                                     const LatentPages& pages, TensorView o_latent) {
  const auto scored = std::span(step.plan.scored)
                          .subspan(static_cast<size_t>(group.scored.first),
                                   static_cast<size_t>(group.scored.count));
  std::vector<SparseRow> rows(scored.begin(), scored.end());
  for (SparseRow& row : rows) row.row -= static_cast<int32_t>(group.first_row);
  fathom::sparse_attention(stream_, q_latent, q_rope, paged_view(step.batch, step.first_key), rows,
                           key_lists(step).rows(group.scored.first, group.scored.count), pages,
                           softmax_scale_, o_latent, {}, bytes_of(workspace_.absorbed));
}

// Keys and values expanded from the latent a chunk at a time; the chunks' results are combined by
// log-sum-exp.
void DeepSeekModel::mha_attention(const AttentionWeights& weights, const Step& step,
                                  const MhaRows& which, const LatentPages& pages) {
  const ForwardBatch& batch = step.batch;
  const int32_t sequence = which.sequence;
  const int64_t all_rows = batch.num_rows(), heads = heads_, v = config_.v_dim;
  const int64_t first_row = batch.query_start[sequence];
  const int64_t queries = which.rows;
  const int64_t context = batch.context_lens[sequence];
  const DType operand = options_.compute;
  const auto page_ids = std::span(batch.block_tables)
                            .subspan(static_cast<size_t>(sequence) * batch.max_pages,
                                     static_cast<size_t>(batch.max_pages));
  const TensorView q_nope = workspace_.q_nope.view(operand, {all_rows, heads, config_.qk_nope_dim});
  // With grouped queries all of a key is a head's own.
  const int64_t shared_dim = config_.gqa ? 0 : config_.qk_rope_dim;
  const TensorView q_rope = workspace_.q_rope.view(operand, {all_rows, heads, config_.qk_rope_dim})
                                .columns(0, shared_dim);
  const TensorView whole = workspace_.whole.view(DType::kF32, {queries, heads, v});
  const TensorView whole_lse = workspace_.whole_lse.view(DType::kF32, {queries, heads});

  const int64_t chunk = options_.attention.mha_key_chunk;
  for (int64_t first_key = step.first_key; first_key < context + queries; first_key += chunk) {
    const int64_t keys = std::min(chunk, context + queries - first_key);
    const TensorView latent = workspace_.latent.view(operand, {keys, config_.kv_lora_rank});
    const TensorView k_rope = workspace_.k_rope.view(operand, {keys, config_.qk_rope_dim});
    const TensorView kv =
        workspace_.kv.view(operand, {keys, heads, config_.qk_nope_dim + config_.v_dim});
    gather_latent(stream_, page_ids, pages, first_key, keys, latent, k_rope);
    if (config_.gqa) {
      expand_grouped(stream_, grouped_, latent, k_rope, kv);
    } else {
      linear(stream_, latent, weights.kv_b, kv.reshape({keys, kv.size(1) * kv.size(2)}));
    }

    // Queries before `first` see none of these keys.
    const int64_t first = std::max<int64_t>(0, first_key - context);
    const int64_t count = queries - first;
    const bool only = first_key == step.first_key;
    const TensorView out = only ? whole : workspace_.part.view(DType::kF32, {count, heads, v});
    const TensorView lse = only ? whole_lse : workspace_.part_lse.view(DType::kF32, {count, heads});
    fathom::mha_attention(stream_, q_nope.rows(first_row + first, count),
                          q_rope.rows(first_row + first, count), kv,
                          k_rope.columns(0, q_rope.size(2)), context + first - first_key,
                          softmax_scale_, out, lse, bytes_of(workspace_.mha));
    if (!only) {
      merge_attention(stream_, out, lse, whole.rows(first, count), whole_lse.rows(first, count));
    }
  }
  convert(stream_, whole,
          workspace_.heads_out.view(operand, {all_rows, heads, v}).rows(first_row, queries));
}

}  // namespace fathom
