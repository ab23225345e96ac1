// Experts that are spread over the ranks of all lanes; part of DeepSeekModel (deepseek_cuda.h).
#include <algorithm>
#include <memory>
#include <vector>

#include "base/math.h"
#include "model/deepseek_cuda.h"
#include "ops/moe/exchange_cuda/moe_over_ranks_cuda.h"

namespace fathom::cuda {
namespace {

// [layers with experts, experts]. plan_kernels() has refused copies.
std::vector<ExpertHost> hosts_of(const ExpertTable& table) {
  std::vector<ExpertHost> hosts;
  for (int64_t layer = 0; layer < table.num_layers(); ++layer) {
    for (int64_t expert = 0; expert < table.num_experts(); ++expert) {
      const ExpertCopy copy = table.copies_of(layer, expert).front();
      hosts.push_back({copy.rank, copy.slot});
    }
  }
  return hosts;
}

// That dispatch and combine have to themselves beside the GEMMs of rounds in turn.
constexpr int kSpareSms = 8;

// How many experts the rank has in a layer, which may be the MTP layer behind the others.
int64_t num_slots(const ModelSpec& spec, size_t layer) {
  const bool is_mtp = layer >= spec.layers.size();
  const LayerSpec& its = is_mtp ? spec.mtp[layer - spec.layers.size()].layer : spec.layers[layer];
  return its.moe ? std::ssize(its.moe->experts) : 0;
}

// In the layer with the most.
int64_t most_slots(const ModelSpec& spec) {
  int64_t most = 0;
  for (size_t layer = 0; layer < spec.layers.size() + spec.mtp.size(); ++layer) {
    most = std::max(most, num_slots(spec, layer));
  }
  return most;
}

}  // namespace

int64_t DeepSeekModel::exchange_bytes() const {
  if (!exchanges()) return 0;
  return exchange_bytes(false) + (options_.rounds_in_turn ? exchange_bytes(true) : 0);
}

// Both forms' workspaces begin alike, and either is of one layer at a time.
int64_t DeepSeekModel::exchange_bytes(bool of_odd_rounds) const {
  int64_t bytes = exchange_view(false, of_odd_rounds).plan.workspace_bytes;
  if (config_.hidden % kScaleBlock == 0) {
    bytes = std::max(bytes, exchange_view(true, of_odd_rounds).plan.workspace_bytes);
  }
  return bytes;
}

// All but the other ranks' memory.
ExpertExchange DeepSeekModel::exchange_view(bool scaled, bool of_odd_rounds) const {
  MoeShape shape = moe_shape(scaled ? kScaleBlock : kBf16WidthUnit);
  shape.num_experts = static_cast<int32_t>(most_slots(spec_));
  if (of_odd_rounds) shape.shared_inter = 0;  // round 0 computes the shared expert
  ExpertExchange view;
  view.plan = plan_moe_exchange(shape, options_.max_rows, scaled);
  view.workspace = of_odd_rounds ? expert_rows_ + exchange_bytes(false) : expert_rows_;
  view.capacity = static_cast<int32_t>(options_.max_rows);
  view.num_experts = static_cast<int32_t>(config_.num_experts);
  view.experts_per_token = shape.experts_per_token;
  view.hidden = shape.hidden;
  view.x_vectors = shape.hidden * (scaled ? 1 : static_cast<int32_t>(sizeof(bf16))) / 16;
  view.scale_blocks = scaled ? shape.hidden / static_cast<int32_t>(kScaleBlock) : 0;
  return view;
}

Result<> DeepSeekModel::join_world(std::span<DeepSeekModel* const> ranks, const PeerGroup& group) {
  const auto layers = ranks.front()->weights_.layers.size();
  for (size_t layer = 0; layer < layers; ++layer) {
    const auto experts = [&](size_t rank) -> MlpWeights& {
      return ranks[rank]->weights_.layers[layer].experts;
    };
    // Rows are quantised for the experts of all ranks.
    float input_scale = 0;
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      if (experts(rank).gate_up.type != experts(0).gate_up.type) {
        return invalid(
            "layer {}: experts of rank {} and of rank 0 are stored in different types, which "
            "--enable-expert-parallel on GPUs does not take",
            layer, rank);
      }
      input_scale = std::max(input_scale, experts(rank).gate_up.input_scale);
    }
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      experts(rank).gate_up.input_scale = input_scale;
    }
  }
  for (size_t at = 0; at < ranks.size(); ++at) {
    DeepSeekModel& model = *ranks[at];
    model.device_.make_current();
    const std::vector<ExpertHost> hosts = hosts_of(*model.spec_.expert_table);
    check(cudaMemcpy(model.hosts_, hosts.data(), hosts.size() * sizeof(ExpertHost),
                     cudaMemcpyHostToDevice),
          "copying where the experts are");
    check(cudaStreamSynchronize(nullptr), "copying where the experts are");
    const auto join = [&](ExpertExchange& exchange, bool scaled, bool of_odd_rounds) {
      exchange = model.exchange_view(scaled, of_odd_rounds);
      exchange.peers = group.rank(static_cast<int>(at));
      for (size_t rank = 0; rank < ranks.size(); ++rank) {
        const DeepSeekModel& of = *ranks[rank];
        const ExpertExchange view = of.exchange_view(scaled, of_odd_rounds);
        ExchangePeer& peer = exchange.ranks[rank];
        peer = exchange_peer(view.plan, view.workspace);
        peer.expert_ids = of.expert_ids_;
        peer.x = scaled ? static_cast<const void*>(of.quantized_) : of.normed_;
        peer.x_scales = scaled ? of.quantized_scales_ : nullptr;
      }
    };
    for (const bool scaled : {false, true}) {
      if (scaled && model.config_.hidden % kScaleBlock != 0) continue;
      join(model.exchanges_[scaled ? 1 : 0], scaled, false);
      if (model.options_.rounds_in_turn) join(model.odd_exchanges_[scaled ? 1 : 0], scaled, true);
    }
    if (model.options_.rounds_in_turn) model.rounds_in_turn_ = std::make_unique<RoundsInTurn>();
  }
  return {};
}

// delta = the MoE block of x, whose experts all ranks compute; in a lane of several ranks this
// rank's part of the sum, which is that of its share of the rows.
void DeepSeekModel::experts_of_ranks(size_t layer, const Activation& x, int64_t rows,
                                     const int32_t* num_valid_rows, const WorldRows& all,
                                     GpuStream stream) {
  const LayerWeights& weights = weights_.layers[layer];
  if (weights.gate == nullptr) return;
  const bool is_last = layer + 1 == weights_.layers.size();
  const int64_t all_rows = is_last ? all.logit_rows : all.rows;
  const bool scaled = is_e4m3(weights.experts.gate_up);
  const ExpertExchange& exchange = exchanges_[scaled ? 1 : 0];
  const ExchangeStep step = {.all_rows = all.is_captured ? exchange.capacity : all_rows,
                             .likely_rows = all_rows,
                             .ranks_alike = spec_.placement.tp,
                             .rank_alike = spec_.tp_rank(),
                             .num_valid_rows = num_valid_rows,
                             .sms = exchange.peers.shares_device ? 2 : plan_.budget.sms,
                             .in_turn = rounds_in_turn_.get(),
                             .odd_rounds = &odd_exchanges_[scaled ? 1 : 0],
                             .spare_sms = kSpareSms};
  int64_t number = 0;  // among the layers with experts
  for (size_t i = 0; i < layer; ++i) number += weights_.layers[i].gate != nullptr ? 1 : 0;
  const ExpertHost* const hosts = hosts_ + number * config_.num_experts;
  MoeShape shape = moe_shape(scaled ? kScaleBlock : kBf16WidthUnit);
  shape.num_experts = static_cast<int32_t>(num_slots(spec_, layer));
  if (scaled) {
    scaled_moe_over_ranks({.shape = shape,
                           .rows = static_cast<int32_t>(rows),
                           .x = x.quantized.values,
                           .x_scales = x.quantized.scales,
                           .x_scales_stride = x.quantized.scales_block_stride,
                           .expert_ids = expert_ids_,
                           .expert_weights = expert_weights_,
                           .gate_up = weights.experts.gate_up.values,
                           .gate_up_scales = weights.experts.gate_up.scales,
                           .down = weights.experts.down.values,
                           .down_scales = weights.experts.down.scales,
                           .shared_gate_up = weights.shared.gate_up.values,
                           .shared_gate_up_scales = weights.shared.gate_up.scales,
                           .shared_down = weights.shared.down.values,
                           .shared_down_scales = weights.shared.down.scales,
                           .out = delta_,
                           .out_type = DType::kBF16,
                           .form = scale_form()},
                          exchange, hosts, step, stream);
    return;
  }
  moe_over_ranks({.shape = shape,
                  .rows = static_cast<int32_t>(rows),
                  .x = x.data,
                  .expert_ids = expert_ids_,
                  .expert_weights = expert_weights_,
                  .gate_up = weights.experts.gate_up.values,
                  .down = weights.experts.down.values,
                  .shared_gate_up = weights.shared.gate_up.values,
                  .shared_down = weights.shared.down.values,
                  .out = delta_,
                  .out_type = DType::kBF16},
                 exchange, hosts, step, stream);
}

void DeepSeekModel::serve_experts(const WorldRows& all, GpuStream stream) {
  for (size_t layer = 0; layer < spec_.layers.size(); ++layer) {
    experts_of_ranks(layer, {}, 0, nullptr, all, stream);
  }
}

void DeepSeekModel::serve_draft_experts(const WorldRows& all, GpuStream stream) {
  experts_of_ranks(spec_.layers.size(), {}, 0, nullptr, all, stream);
}

}  // namespace fathom::cuda
