#include "model/deepseek.h"

#include <algorithm>
#include <new>

#include "comm/collectives.h"
#include "model/lane_logits.h"
#include "model/layer_options.h"
#include "model/step_hash.h"
#include "ops/convert/convert.h"
#include "ops/embedding/embedding.h"
#include "ops/gate/gate.h"
#include "ops/linear/linear.h"
#include "ops/rms_norm/rms_norm.h"
#include "placement/split.h"

namespace fathom {
namespace {

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
                                                           const Stream& stream,
                                                           int64_t mtp_layers) {
  const ModelSpec spec = make_spec(checkpoint.config(), mtp_layers);
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
  model->rope_ = rope_table(config);
  model->grouped_ = {spec.layers.front().attention.heads.first,
                     config.gqa ? config.num_heads / config.gqa->kv_heads : 1};
  model->softmax_scale_ = static_cast<float>(config.softmax_scale());
  model->eps_ = static_cast<float>(config.rms_norm_eps);
  model->weights_ = std::move(weights);
  model->draft_states_.resize(model->weights_.mtp.size());
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
                            TensorView logits_out, std::span<int32_t> tokens) {
  const int64_t rows = batch.num_rows();
  FATHOM_CHECK(rows >= 0 && rows <= options_.max_rows, "{} rows, at most {}", rows,
               options_.max_rows);
  if (world_ != nullptr) world_->set_plan(expert_table_->fingerprint());
  if (rows == 0) return host_experts();
  const Step step = make_step(batch, 0);
  const TensorView x = workspace_.residual.view(DType::kF32, {rows, config_.hidden});
  std::fill(expert_counts_.begin(), expert_counts_.end(), 0);
  embed(step, x);
  int64_t moe_layer = 0;
  for (int64_t layer = 0; layer < config_.num_layers; ++layer) {
    const LayerWeights& weights = weights_.layers[layer];
    run_layer(weights, moe_layer, step, layer_cache(cache, layer), x);
    if (weights.moe) ++moe_layer;
  }
  if (has_mtp())
    make_states(step, x, weights_.final_norm,
                workspace_.hidden.view(options_.compute, {rows, config_.hidden}));
  logits(step, x, weights_.final_norm, {}, logits_out, tokens);
  if (has_mtp()) write_mtp_rows(batch, cache);
}

DeepSeekModel::Step DeepSeekModel::make_step(const ForwardBatch& batch, int32_t first_key) {
  const AttentionShape shape{.latent_dim = config_.kv_lora_rank,
                             .rope_dim = config_.qk_rope_dim,
                             .nope_dim = config_.qk_nope_dim,
                             .v_dim = config_.v_dim,
                             .grouped = config_.gqa.has_value(),
                             .sparse = sparse_limits(config_, options_.attention)};
  Step step{batch, plan_attention(batch, shape, options_.attention, first_key), cache_slots(batch),
            LaneRows(lane_, batch.num_rows(), config_.hidden), first_key};
  if (lane_ != nullptr) {
    lane_plan_ = hash_attention(step.plan, hash_batch(batch, 0));
    lane_->set_plan(lane_plan_);
  }
  return step;
}

DeepSeekModel::LayerCache DeepSeekModel::layer_cache(const LatentCache& cache, int64_t layer) {
  LayerCache of_layer{cache.layer(layer), {}};
  if (cache.has_index_keys(layer)) of_layer.index_keys = cache.index_keys(layer);
  return of_layer;
}

// x [rows, hidden] f32, where rows are divided this rank's own: x += attention, x += feed-forward.
void DeepSeekModel::run_layer(const LayerWeights& weights, std::optional<int64_t> moe_layer,
                              const Step& step, const LayerCache& cache, TensorView x) {
  const TensorView normed = workspace_.normed.view(options_.compute, {x.size(0), config_.hidden});
  const Slice own = step.rows.own();
  const TensorView own_x = x.rows(own.first, own.count);
  const TensorView own_normed = normed.rows(own.first, own.count);
  rms_norm(stream_, own_x, norm_weight(weights.input_norm), eps_, own_normed);
  attention(weights.attention, step, cache, normed, x);
  rms_norm(stream_, own_x, norm_weight(weights.post_attention_norm), eps_, own_normed);
  if (weights.moe && exchange_ != nullptr && moe_layer) {
    exchanged_moe(*weights.moe, *moe_layer, step.rows, normed, x);
  } else {
    feed_forward(weights, step.rows, normed, x);
  }
}

// The step of a lane without rows: its ranks compute the others' tokens.
void DeepSeekModel::host_experts() {
  std::fill(expert_counts_.begin(), expert_counts_.end(), 0);
  const TensorView normed = workspace_.normed.view(options_.compute, {0, config_.hidden});
  const TensorView residual = workspace_.residual.view(DType::kF32, {0, config_.hidden});
  for (size_t i = 0; i < moe_layers_.size(); ++i) {
    exchanged_moe(*weights_.layers[moe_layers_[i]].moe, static_cast<int64_t>(i),
                  LaneRows(lane_, 0, config_.hidden), normed, residual);
  }
}

std::span<const MlpWeights> DeepSeekModel::expert_slots(int64_t moe_layer) const {
  return weights_.layers[moe_layers_[static_cast<size_t>(moe_layer)]].moe->experts;
}

void DeepSeekModel::place_experts(std::shared_ptr<const ExpertTable> table, ExpertSlots&& slots) {
  FATHOM_CHECK(exchange_ != nullptr, "experts without an exchange of tokens");
  expert_table_ = std::move(table);
  for (auto& [moe_layer, of_layer] : slots) {
    weights_.layers[moe_layers_[static_cast<size_t>(moe_layer)]].moe->experts = std::move(of_layer);
  }
}

// Where this rank's part of a sum over the lane goes: to the residual if it is alone.
TensorView DeepSeekModel::part_of_sum(TensorView residual) {
  if (lane_ == nullptr) return residual;
  return workspace_.partial.view(DType::kF32, {residual.size(0), residual.size(1)});
}

void DeepSeekModel::add_parts(const LaneRows& rows, TensorView residual) {
  if (lane_ != nullptr) rows.add_sum(part_of_sum(residual), residual, stream_.pool());
}

// Each rank looks up the tokens that it has; the others' rows are zero.
void DeepSeekModel::embed(const Step& step, TensorView residual) {
  const ForwardBatch& batch = step.batch;
  const ConstTensorView table =
      weights_.embedding.view(weights_.embedding_dtype, {vocabulary_.count, config_.hidden});
  if (lane_ == nullptr) return embedding(stream_, batch.token_ids, table, residual);
  std::vector<int32_t> own(batch.token_ids);
  const auto is_own = [&](int32_t id) { return id >= vocabulary_.first && id < vocabulary_.end(); };
  for (int32_t& id : own) id = is_own(id) ? id - static_cast<int32_t>(vocabulary_.first) : 0;
  const TensorView part = part_of_sum(residual);
  embedding(stream_, own, table, part);
  for (size_t row = 0; row < own.size(); ++row) {
    if (is_own(batch.token_ids[row])) continue;
    std::fill_n(part.row<float>(static_cast<int64_t>(row)), config_.hidden, 0.0f);
  }
  const Slice rows = step.rows.own();
  const TensorView sums = residual.rows(rows.first, rows.count);
  std::fill_n(sums.data<float>(), sums.num_elements(), 0.0f);
  add_parts(step.rows, residual);
}

// residual += mlp(x), dense or MoE. At first, x holds only the rank's own rows.
void DeepSeekModel::feed_forward(const LayerWeights& weights, const LaneRows& rows, TensorView x,
                                 TensorView residual) {
  const Routes routes = weights.moe ? route(*weights.moe, x, rows.own()) : Routes{};
  if (rows.are_divided()) {
    rows.gather(
        [&](int rank, std::vector<Piece>& pieces) {
          const Slice part = rows.of(rank);
          LaneRows::add_piece(x, part, pieces);
          if (!weights.moe) return;
          LaneRows::add_piece(routes.expert_ids, part, pieces);
          LaneRows::add_piece(routes.weights, part, pieces);
        },
        stream_.pool());
  }
  const TensorView out = part_of_sum(residual);
  if (lane_ != nullptr) std::fill_n(out.data<float>(), out.num_elements(), 0.0f);
  add_feed_forward(weights, routes, x, out);
  add_parts(rows, residual);
}

// out += this rank's columns of mlp(x).
void DeepSeekModel::add_feed_forward(const LayerWeights& weights, const Routes& routes,
                                     ConstTensorView x, TensorView out) {
  const std::span<std::byte> workspace = bytes_of(workspace_.mlp);
  const auto has_columns = [](const MlpWeights& block) { return block.down.cols() > 0; };
  if (weights.dense) {
    if (has_columns(*weights.dense)) mlp(stream_, x, *weights.dense, out, workspace);
    return;
  }
  const MoeWeights& moe_weights = *weights.moe;
  const MlpWeights* const shared =
      moe_weights.shared && has_columns(*moe_weights.shared) ? &*moe_weights.shared : nullptr;
  if (has_columns(moe_weights.experts.front())) {
    moe(stream_, x, routes.expert_ids, routes.weights, moe_weights.experts, shared, out, workspace);
  } else if (shared != nullptr) {
    mlp(stream_, x, *shared, out, workspace);
  }
}

// Routes some rows of x; the others' results are not written.
DeepSeekModel::Routes DeepSeekModel::route(const MoeWeights& weights, ConstTensorView x,
                                           Slice some) {
  const int64_t rows = x.size(0), k = config_.experts_per_token;
  const Routes routes = {workspace_.expert_ids.view(DType::kI32, {rows, k}),
                         workspace_.expert_weights.view(DType::kF32, {rows, k})};
  if (some.count == 0) return routes;
  const TensorView router_logits =
      workspace_.router_logits.view(DType::kF32, {some.count, config_.num_experts});
  ConstTensorView router_input = x.rows(some.first, some.count);
  if (x.dtype() != DType::kF32) {
    const TensorView widened =
        workspace_.normed_f32.view(DType::kF32, {some.count, config_.hidden});
    convert(stream_, router_input, widened);
    router_input = widened;
  }
  linear(stream_, router_input, weights.gate, router_logits);
  const bool biased = weights.gate_bias.size() > 0;
  gate(stream_, router_logits, biased ? norm_weight(weights.gate_bias) : ConstTensorView(),
       gate_options(config_), routes.expert_ids.rows(some.first, some.count),
       routes.weights.rows(some.first, some.count));
  return routes;
}

// residual += moe(x). Each of the lane's ranks adds the terms of its own rows, whether or not the
// rest of the step is divided, and gathers the others' then.
void DeepSeekModel::exchanged_moe(const MoeWeights& weights, int64_t moe_layer,
                                  const LaneRows& rows, ConstTensorView x, TensorView residual) {
  const Slice own = rows.of_this_rank();
  const ConstTensorView own_x = x.rows(own.first, own.count);
  const TensorView out = residual.rows(own.first, own.count);
  Routes routes = route(weights, x, own);
  routes.expert_ids = routes.expert_ids.rows(own.first, own.count);
  routes.weights = routes.weights.rows(own.first, own.count);
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
  if (lane_ == nullptr || x.size(0) == 0 || rows.are_divided()) return;
  rows.gather(
      [&](int rank, std::vector<Piece>& pieces) {
        const Slice part = rows.of(rank);
        LaneRows::add_piece(residual, part, pieces);
      },
      stream_.pool());
}

ConstTensorView DeepSeekModel::logits(const Step& step, ConstTensorView residual,
                                      const Buffer& norm, const DraftHead& draft_head,
                                      TensorView out, std::span<int32_t> tokens) {
  const std::vector<int32_t>& wanted = step.batch.logit_rows;
  const auto count = static_cast<int64_t>(wanted.size());
  if (count == 0) {
    if (step.rows.are_divided()) barrier(*lane_);  // the last sums' parts are read
    return {};
  }
  const TensorView normed = workspace_.normed.view(options_.compute, {count, config_.hidden});
  // Which of the wanted rows are among some rows.
  const auto wanted_among = [&](Slice rows) {
    const auto before = [&](int64_t row) {
      return std::lower_bound(wanted.begin(), wanted.end(), row) - wanted.begin();
    };
    const int64_t first = before(rows.first);
    return Slice{first, before(rows.end()) - first};
  };
  const Slice own = wanted_among(step.rows.own());
  // Runs of consecutive rows: all of a prompt's, or the last row of each sequence.
  for (int64_t i = own.first; i < own.end();) {
    int64_t run = 1;
    while (i + run < own.end() && wanted[i + run] == wanted[i] + run) ++run;
    rms_norm(stream_, residual.rows(wanted[i], run), norm_weight(norm), eps_, normed.rows(i, run));
    i += run;
  }
  const auto multiply = [&](TensorView to) {
    if (draft_head.empty()) {
      linear(stream_, normed, weights_.head, to);
    } else {
      approximate_logits(stream_, normed, draft_head, bytes_of(workspace_.mtp_hidden), to);
    }
  };
  if (lane_ == nullptr) {
    multiply(out);
    return normed;
  }
  if (step.rows.are_divided()) {
    step.rows.gather(
        [&](int rank, std::vector<Piece>& pieces) {
          const Slice part = wanted_among(step.rows.of(rank));
          LaneRows::add_piece(normed, part, pieces);
        },
        stream_.pool());
  }
  const int64_t bytes = count * vocabulary_.count * static_cast<int64_t>(sizeof(float));
  if (logits_part_.size() < bytes) {
    auto larger = Buffer::allocate(bytes, "logits");
    if (!larger) throw std::bad_alloc();
    logits_part_ = std::move(*larger);
  }
  const TensorView part = logits_part_.view(DType::kF32, {count, vocabulary_.count});
  multiply(part);
  collect_logits(*lane_, part, step.batch.largest_only, config_.vocab_size, out, tokens,
                 stream_.pool());
  return normed;
}

}  // namespace fathom
