#include "model/deepseek.h"

#include <algorithm>
#include <new>

#include "comm/collectives.h"
#include "model/layer_options.h"
#include "model/step_hash.h"
#include "ops/attention/attention.h"
#include "ops/convert/convert.h"
#include "ops/embedding/embedding.h"
#include "ops/gate/gate.h"
#include "ops/linear/linear.h"
#include "ops/rms_norm/rms_norm.h"
#include "placement/split.h"

namespace fathom {
namespace {

ConstTensorView norm_weight(const Buffer& buffer) {
  return buffer.view(DType::kF32, {buffer.size() / 4});
}

std::span<std::byte> bytes_of(const Buffer& buffer) {
  return {buffer.data(), static_cast<size_t>(buffer.size())};
}

// Slot of each token's cache row: page * kPageSize + slot.
std::vector<int64_t> cache_slots(const ForwardBatch& batch) {
  std::vector<int64_t> slots(batch.token_ids.size());
  for (int64_t s = 0; s < batch.num_sequences(); ++s) {
    for (int64_t row = batch.query_start[s]; row < batch.query_start[s + 1]; ++row) {
      const int64_t position = batch.positions[row];
      const int32_t page = batch.block_tables[s * batch.max_pages + position / kPageSize];
      FATHOM_CHECK(page >= 0, "sequence {} has no page for position {}", s, position);
      slots[row] = page * kPageSize + position % kPageSize;
    }
  }
  return slots;
}

}  // namespace

Result<std::unique_ptr<DeepSeekModel>> DeepSeekModel::load(const Checkpoint& checkpoint,
                                                           const ModelOptions& options,
                                                           const LoadOptions& load_options,
                                                           const Stream& stream) {
  const ModelSpec spec = make_spec(checkpoint.config());
  FATHOM_TRY(std::vector<ModelWeights> weights,
             load_weights(checkpoint, {&spec, 1}, options.compute, load_options));
  return create(spec, std::move(weights.front()), options, stream, {});
}

Result<std::unique_ptr<DeepSeekModel>> DeepSeekModel::create(const ModelSpec& spec,
                                                             ModelWeights weights,
                                                             const ModelOptions& options,
                                                             const Stream& stream,
                                                             const RankGroups& groups) {
  FATHOM_CHECK((groups.lane == nullptr ? 1 : groups.lane->size()) == spec.placement.tp,
               "tp {} without its lane", spec.placement.tp);
  Group* const lane = spec.placement.tp == 1 ? nullptr : groups.lane;
  std::unique_ptr<DeepSeekModel> model(new DeepSeekModel(spec, options, stream, lane));
  const ModelConfig& config = model->config_;
  model->rope_ = make_rope_table(config.qk_rope_dim, config.rope_theta, yarn_parameters(config));
  model->softmax_scale_ = static_cast<float>(config.softmax_scale());
  model->eps_ = static_cast<float>(config.rms_norm_eps);
  model->weights_ = std::move(weights);
  FATHOM_TRY(model->workspace_,
             Workspace::allocate(spec, options.compute, options.max_rows, options.attention,
                                 stream.pool().num_threads()));
  if (spec.expert_table == nullptr) return model;
  FATHOM_CHECK(groups.world != nullptr && groups.world->size() == spec.placement.world(),
               "{} ranks without their group", spec.placement.world());
  model->world_ = groups.world;
  model->exchange_ = std::make_unique<ExpertExchange>(*groups.world, stream);
  for (size_t layer = 0; layer < spec.layers.size(); ++layer) {
    if (spec.layers[layer].moe) model->moe_layers_.push_back(layer);
  }
  model->expert_counts_.resize(model->moe_layers_.size() * static_cast<size_t>(config.num_experts));
  return model;
}

void DeepSeekModel::forward(const ForwardBatch& batch, const LatentCache& cache,
                            TensorView logits_out) {
  const int64_t rows = batch.num_rows();
  FATHOM_CHECK(rows >= 0 && rows <= options_.max_rows, "{} rows, at most {}", rows,
               options_.max_rows);
  if (world_ != nullptr) world_->set_plan(expert_table_->fingerprint());
  if (rows == 0) return host_experts();
  const AttentionShape shape{config_.kv_lora_rank, config_.qk_rope_dim, config_.qk_nope_dim,
                             config_.v_dim};
  const Step step{batch, plan_attention(batch, shape, options_.attention), cache_slots(batch)};
  if (lane_ != nullptr) lane_->set_plan(hash_attention(step.plan, hash_batch(batch, 0)));

  const TensorView x = workspace_.residual.view(DType::kF32, {rows, config_.hidden});
  const TensorView normed = workspace_.normed.view(options_.compute, {rows, config_.hidden});
  std::fill(expert_counts_.begin(), expert_counts_.end(), 0);
  embed(batch, x);
  int64_t moe_layer = 0;
  for (int64_t layer = 0; layer < config_.num_layers; ++layer) {
    const LayerWeights& weights = weights_.layers[layer];
    rms_norm(stream_, x, norm_weight(weights.input_norm), eps_, normed);
    attention(weights.attention, step, cache.layer(layer), normed, x);
    rms_norm(stream_, x, norm_weight(weights.post_attention_norm), eps_, normed);
    if (weights.moe && exchange_ != nullptr) {
      exchanged_moe(*weights.moe, moe_layer++, normed, x);
    } else {
      feed_forward(weights, normed, x);
    }
  }
  logits(step, x, logits_out);
}

// The step of a lane without rows: its ranks compute the others' tokens.
void DeepSeekModel::host_experts() {
  std::fill(expert_counts_.begin(), expert_counts_.end(), 0);
  const TensorView normed = workspace_.normed.view(options_.compute, {0, config_.hidden});
  const TensorView residual = workspace_.residual.view(DType::kF32, {0, config_.hidden});
  for (size_t i = 0; i < moe_layers_.size(); ++i) {
    exchanged_moe(*weights_.layers[moe_layers_[i]].moe, static_cast<int64_t>(i), normed, residual);
  }
}

std::span<const MlpWeights> DeepSeekModel::expert_slots(int64_t moe_layer) const {
  return weights_.layers[moe_layers_[static_cast<size_t>(moe_layer)]].moe->experts;
}

void DeepSeekModel::place_experts(std::shared_ptr<const ExpertTable> table, ExpertSlots slots) {
  FATHOM_CHECK(exchange_ != nullptr, "experts without an exchange of tokens");
  expert_table_ = std::move(table);
  for (auto& [moe_layer, of_layer] : slots) {
    weights_.layers[moe_layers_[static_cast<size_t>(moe_layer)]].moe->experts = std::move(of_layer);
  }
}

template <typename Add>
void DeepSeekModel::add_over_lane(TensorView residual, const Add& add) {
  if (lane_ == nullptr) return add(residual);
  const auto size = static_cast<size_t>(residual.num_elements());
  const TensorView partial =
      workspace_.partial.view(DType::kF32, {residual.size(0), residual.size(1)});
  std::fill_n(partial.data<float>(), size, 0.0f);
  add(partial);
  all_reduce_add(*lane_, std::span(partial.data<float>(), size),
                 std::span(residual.data<float>(), size), &stream_.pool());
}

// Each rank looks up the tokens that it has; the others' rows are zero.
void DeepSeekModel::embed(const ForwardBatch& batch, TensorView residual) {
  const ConstTensorView table =
      weights_.embedding.view(weights_.embedding_dtype, {vocabulary_.count, config_.hidden});
  if (lane_ == nullptr) return embedding(stream_, batch.token_ids, table, residual);
  std::vector<int32_t> own(batch.token_ids);
  const auto is_own = [&](int32_t id) { return id >= vocabulary_.first && id < vocabulary_.end(); };
  for (int32_t& id : own) id = is_own(id) ? id - static_cast<int32_t>(vocabulary_.first) : 0;
  embedding(stream_, own, table, residual);
  for (size_t row = 0; row < own.size(); ++row) {
    if (is_own(batch.token_ids[row])) continue;
    std::fill_n(residual.row<float>(static_cast<int64_t>(row)), config_.hidden, 0.0f);
  }
  const std::span values(residual.data<float>(), static_cast<size_t>(residual.num_elements()));
  all_reduce(*lane_, values, values, &stream_.pool());
}

// residual += W_o · attention(x)
void DeepSeekModel::attention(const AttentionWeights& weights, const Step& step,
                              const LatentPages& pages, ConstTensorView x, TensorView residual) {
  const int64_t rows = x.size(0), heads = heads_;
  const DType operand = options_.compute;
  const TensorView kv_a = workspace_.kv_a.view(DType::kF32, {rows, config_.latent_dim()});
  const TensorView q = workspace_.q.view(DType::kF32, {rows, heads, config_.qk_dim()});
  const TensorView q_rows = q.reshape({rows, heads * config_.qk_dim()});
  if (config_.q_lora_rank > 0) {
    const TensorView q_a = workspace_.q_a.view(DType::kF32, {rows, config_.q_lora_rank});
    const TensorView q_a_normed = workspace_.q_a_normed.view(operand, {rows, config_.q_lora_rank});
    const LinearTask down[] = {{x, &weights.q_a, q_a}, {x, &weights.kv_a, kv_a}};
    linear_group(stream_, down);
    rms_norm(stream_, q_a, norm_weight(weights.q_a_norm), kInnerNormEps, q_a_normed);
    linear(stream_, q_a_normed, weights.q_b, q_rows);
  } else {
    const LinearTask both[] = {{x, &weights.q_b, q_rows}, {x, &weights.kv_a, kv_a}};
    linear_group(stream_, both);
  }
  split_rope_query(stream_, q, step.batch.positions, rope_,
                   workspace_.q_nope.view(operand, {rows, heads, config_.qk_nope_dim}),
                   workspace_.q_rope.view(operand, {rows, heads, config_.qk_rope_dim}));
  norm_rope_cache_write(stream_, kv_a, step.batch.positions, step.slots,
                        norm_weight(weights.kv_a_norm), kInnerNormEps, rope_, pages);

  for (const AbsorbedGroup& group : step.plan.absorbed) {
    absorbed_attention(weights, step, group, pages);
  }
  for (const int32_t sequence : step.plan.mha) mha_attention(weights, step, sequence, pages);

  add_over_lane(residual, [&](TensorView out) {
    linear(stream_, workspace_.heads_out.view(operand, {rows, heads * config_.v_dim}), weights.o,
           out, LinearMode::kAccumulate);
  });
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

  std::vector<LinearTask> tasks(static_cast<size_t>(heads));
  for (int64_t h = 0; h < heads; ++h) {
    tasks[h] = {q_nope.select(1, h), &weights.uk[h], q_latent.select(1, h)};
  }
  linear_group(stream_, tasks);
  fathom::absorbed_attention(stream_, q_latent, q_rope, group.view(step.batch), group.sequences,
                             pages, softmax_scale_, o_latent, bytes_of(workspace_.absorbed));
  for (int64_t h = 0; h < heads; ++h) {
    tasks[h] = {o_latent.select(1, h), &weights.uv[h], out.select(1, h)};
  }
  linear_group(stream_, tasks);
}

// Keys and values expanded from the latent a chunk at a time; the chunks' results are combined by
// log-sum-exp.
void DeepSeekModel::mha_attention(const AttentionWeights& weights, const Step& step,
                                  int32_t sequence, const LatentPages& pages) {
  const ForwardBatch& batch = step.batch;
  const int64_t all_rows = batch.num_rows(), heads = heads_, v = config_.v_dim;
  const int64_t first_row = batch.query_start[sequence];
  const int64_t queries = batch.query_start[sequence + 1] - first_row;
  const int64_t context = batch.context_lens[sequence];
  const DType operand = options_.compute;
  const auto page_ids = std::span(batch.block_tables)
                            .subspan(static_cast<size_t>(sequence) * batch.max_pages,
                                     static_cast<size_t>(batch.max_pages));
  const TensorView q_nope = workspace_.q_nope.view(operand, {all_rows, heads, config_.qk_nope_dim});
  const TensorView q_rope = workspace_.q_rope.view(operand, {all_rows, heads, config_.qk_rope_dim});
  const TensorView whole = workspace_.whole.view(DType::kF32, {queries, heads, v});
  const TensorView whole_lse = workspace_.whole_lse.view(DType::kF32, {queries, heads});

  const int64_t chunk = options_.attention.mha_key_chunk;
  for (int64_t first_key = 0; first_key < context + queries; first_key += chunk) {
    const int64_t keys = std::min(chunk, context + queries - first_key);
    const TensorView latent = workspace_.latent.view(operand, {keys, config_.kv_lora_rank});
    const TensorView k_rope = workspace_.k_rope.view(operand, {keys, config_.qk_rope_dim});
    const TensorView kv =
        workspace_.kv.view(operand, {keys, heads, config_.qk_nope_dim + config_.v_dim});
    gather_latent(stream_, page_ids, pages, first_key, keys, latent, k_rope);
    linear(stream_, latent, weights.kv_b, kv.reshape({keys, kv.size(1) * kv.size(2)}));

    // Queries before `first` see none of these keys.
    const int64_t first = std::max<int64_t>(0, first_key - context);
    const int64_t count = queries - first;
    const bool only = first_key == 0;
    const TensorView out = only ? whole : workspace_.part.view(DType::kF32, {count, heads, v});
    const TensorView lse = only ? whole_lse : workspace_.part_lse.view(DType::kF32, {count, heads});
    fathom::mha_attention(
        stream_, q_nope.rows(first_row + first, count), q_rope.rows(first_row + first, count), kv,
        k_rope, context + first - first_key, softmax_scale_, out, lse, bytes_of(workspace_.mha));
    if (!only) {
      merge_attention(stream_, out, lse, whole.rows(first, count), whole_lse.rows(first, count));
    }
  }
  convert(stream_, whole,
          workspace_.heads_out.view(operand, {all_rows, heads, v}).rows(first_row, queries));
}

// residual += mlp(x), dense or MoE.
void DeepSeekModel::feed_forward(const LayerWeights& weights, ConstTensorView x,
                                 TensorView residual) {
  add_over_lane(residual, [&](TensorView out) { feed_forward_part(weights, x, out); });
}

// out += this rank's columns of mlp(x).
void DeepSeekModel::feed_forward_part(const LayerWeights& weights, ConstTensorView x,
                                      TensorView out) {
  const std::span<std::byte> workspace = bytes_of(workspace_.mlp);
  const auto has_columns = [](const MlpWeights& block) { return block.down.cols() > 0; };
  if (weights.dense) {
    if (has_columns(*weights.dense)) mlp(stream_, x, *weights.dense, out, workspace);
    return;
  }
  const MoeWeights& moe_weights = *weights.moe;
  const Routes routes = route(moe_weights, x);
  const MlpWeights* const shared =
      moe_weights.shared && has_columns(*moe_weights.shared) ? &*moe_weights.shared : nullptr;
  if (has_columns(moe_weights.experts.front())) {
    moe(stream_, x, routes.expert_ids, routes.weights, moe_weights.experts, shared, out, workspace);
  } else if (shared != nullptr) {
    mlp(stream_, x, *shared, out, workspace);
  }
}

DeepSeekModel::Routes DeepSeekModel::route(const MoeWeights& weights, ConstTensorView x) {
  const int64_t rows = x.size(0), k = config_.experts_per_token;
  const TensorView router_logits =
      workspace_.router_logits.view(DType::kF32, {rows, config_.num_experts});
  const Routes routes = {workspace_.expert_ids.view(DType::kI32, {rows, k}),
                         workspace_.expert_weights.view(DType::kF32, {rows, k})};
  if (rows == 0) return routes;
  ConstTensorView router_input = x;
  if (x.dtype() != DType::kF32) {
    const TensorView widened = workspace_.normed_f32.view(DType::kF32, {rows, config_.hidden});
    convert(stream_, x, widened);
    router_input = widened;
  }
  linear(stream_, router_input, weights.gate, router_logits);
  const bool biased = weights.gate_bias.size() > 0;
  gate(stream_, router_logits, biased ? norm_weight(weights.gate_bias) : ConstTensorView(),
       gate_options(config_), routes.expert_ids, routes.weights);
  return routes;
}

// residual += moe(x). Each of the lane's ranks adds the terms of its slice of the rows and gathers
// the other slices.
void DeepSeekModel::exchanged_moe(const MoeWeights& weights, int64_t moe_layer, ConstTensorView x,
                                  TensorView residual) {
  const int64_t rows = x.size(0), lane_size = lane_ == nullptr ? 1 : lane_->size();
  const auto slice_of = [&](int rank) {
    return split_units(rows, 1, static_cast<int>(lane_size), rank);
  };
  const Slice own = slice_of(lane_ == nullptr ? 0 : lane_->rank());
  const ConstTensorView own_x = x.rows(own.first, own.count);
  const TensorView out = residual.rows(own.first, own.count);
  const Routes routes = route(weights, own_x);
  const std::span ids(routes.expert_ids.data<int32_t>(),
                      static_cast<size_t>(routes.expert_ids.num_elements()));
  for (const int32_t expert : ids) {
    ++expert_counts_[static_cast<size_t>(moe_layer * config_.num_experts + expert)];
  }
  exchange_->add_experts(*expert_table_, moe_layer, weights.experts, own_x, routes.expert_ids,
                         routes.weights, out);
  if (own.count > 0 && weights.shared) {
    mlp(stream_, own_x, *weights.shared, out, bytes_of(workspace_.mlp));
  }
  if (lane_ == nullptr || rows == 0) return;
  std::vector<int64_t> counts(static_cast<size_t>(lane_size));
  for (int rank = 0; rank < lane_size; ++rank) {
    counts[static_cast<size_t>(rank)] = slice_of(rank).count * config_.hidden;
  }
  const auto floats_of = [](TensorView rows_of) {
    return std::span(rows_of.data<float>(), static_cast<size_t>(rows_of.num_elements()));
  };
  all_gather(*lane_, floats_of(out), counts, floats_of(residual));
}

void DeepSeekModel::logits(const Step& step, ConstTensorView residual, TensorView out) {
  const std::vector<int32_t>& wanted = step.batch.logit_rows;
  const auto count = static_cast<int64_t>(wanted.size());
  if (count == 0) return;
  const TensorView normed = workspace_.normed.view(options_.compute, {count, config_.hidden});
  // Runs of consecutive rows: all of a prompt's, or the last row of each sequence.
  for (int64_t i = 0; i < count;) {
    int64_t run = 1;
    while (i + run < count && wanted[i + run] == wanted[i] + run) ++run;
    rms_norm(stream_, residual.rows(wanted[i], run), norm_weight(weights_.final_norm), eps_,
             normed.rows(i, run));
    i += run;
  }
  if (lane_ == nullptr) return linear(stream_, normed, weights_.head, out);
  const int64_t bytes = count * vocabulary_.count * static_cast<int64_t>(sizeof(float));
  if (logits_part_.size() < bytes) {
    auto larger = Buffer::allocate(bytes, "logits");
    if (!larger) throw std::bad_alloc();
    logits_part_ = std::move(*larger);
  }
  const TensorView part = logits_part_.view(DType::kF32, {count, vocabulary_.count});
  linear(stream_, normed, weights_.head, part);
  gather_logits(part, out);
}

// Each rank's columns, to the lane's first rank.
void DeepSeekModel::gather_logits(ConstTensorView part, TensorView out) {
  const auto bytes = static_cast<size_t>(part.num_elements()) * sizeof(float);
  const auto parts = lane_->meet(Collective::kAllGather,
                                 ConstBytes(static_cast<const std::byte*>(part.raw()), bytes));
  if (lane_->rank() == 0) {
    for (int rank = 0; rank < lane_->size(); ++rank) {
      const Slice columns = split_vocabulary(config_.vocab_size, lane_->size(), rank);
      const auto* from = reinterpret_cast<const float*>(parts[static_cast<size_t>(rank)].data());
      for (int64_t row = 0; row < part.size(0); ++row, from += columns.count) {
        std::copy_n(from, columns.count, out.row<float>(row) + columns.first);
      }
    }
  }
  barrier(*lane_);  // the parts are read
}

}  // namespace fathom
