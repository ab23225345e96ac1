#include "placement/expert_balancer.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/math.h"
#include "placement/eplb.h"
#include "placement/rank_balance.h"

namespace fathom {
namespace {

// Whole parts of the window; one more is being filled.
constexpr int64_t kPanes = 10;

ExpertLoad window_of(const ExpertTable& table, int64_t steps) {
  const int64_t panes = std::min(kPanes, steps);
  return {table.num_layers(), table.num_experts(), panes + 1, ceil_div(steps, panes)};
}

// Makes a table with `like`'s expert and rank counts.
std::shared_ptr<const ExpertTable> make_table(const ExpertTable& like, const ExpertLists& lists) {
  auto table = ExpertTable::create(like.num_experts(), like.num_ranks(), lists, "");
  FATHOM_CHECK(table.has_value(), "{}", table.error().message);
  return std::make_shared<const ExpertTable>(*std::move(table));
}

}  // namespace

ExpertBalancer::ExpertBalancer(std::shared_ptr<const ExpertTable> table, int64_t redundant_experts,
                               const ExpertBalancerOptions& options)
    : table_(std::move(table)),
      target_(table_),
      replicas_(round_up(table_->num_experts() + redundant_experts, table_->num_ranks())),
      options_(options),
      load_(window_of(*table_, options.rebalance_steps)),
      tokens_(static_cast<size_t>(table_->num_layers() * table_->num_experts())) {}

void ExpertBalancer::count(std::span<const int32_t> tokens) {
  const std::lock_guard lock(mutex_);
  const int64_t experts = table_->num_experts();
  FATHOM_CHECK(std::ssize(tokens) == table_->num_layers() * experts, "{} counts of {} x {} experts",
               tokens.size(), table_->num_layers(), experts);
  for (int64_t i = 0; i < std::ssize(tokens); ++i) {
    const int32_t count = tokens[static_cast<size_t>(i)];
    if (count == 0) continue;
    load_.add(i / experts, i % experts, count);
    tokens_[static_cast<size_t>(i)] += count;
  }
}

std::shared_ptr<const ExpertTable> ExpertBalancer::end_step() {
  const std::lock_guard lock(mutex_);
  load_.end_step();
  ++steps_;
  if (table_ == target_) {
    if (!options_.rebalances || steps_ < options_.rebalance_steps) return nullptr;
    steps_ = 0;
    target_ = plan();
    if (table_ == target_) return nullptr;
    ++moves_;
  }
  return table_ = next_towards_target();
}

// table_ with the next layers of target_; target_ itself with the last of them.
std::shared_ptr<const ExpertTable> ExpertBalancer::next_towards_target() {
  if (options_.layers_a_step == 0) return target_;
  ExpertLists lists = table_->lists();
  const ExpertLists wanted = target_->lists();
  int64_t moved = 0;
  for (size_t layer = 0; layer < lists.size(); ++layer) {
    if (lists[layer] == wanted[layer]) continue;
    if (moved++ == options_.layers_a_step) return make_table(*table_, lists);
    lists[layer] = wanted[layer];
  }
  return target_;
}

ExpertStats ExpertBalancer::stats() const {
  const std::lock_guard lock(mutex_);
  ExpertStats stats = {.ranks = table_->num_ranks(),
                       .experts = table_->num_experts(),
                       .window = load_.snapshot(*table_),
                       .layer_balance = {},
                       .tokens = tokens_,
                       .moves = moves_,
                       .table = table_};
  for (int64_t layer = 0; layer < table_->num_layers(); ++layer) {
    stats.layer_balance.push_back(load_.balance(*table_, layer).ratio());
  }
  return stats;
}

// The table with the layers that get better, or table_ itself if none does.
std::shared_ptr<const ExpertTable> ExpertBalancer::plan() const {
  const BalanceShape shape = {
      .experts = table_->num_experts(), .replicas = replicas_, .gpus = table_->num_ranks()};
  const std::vector<double> loads = load_.loads();
  const auto planned = balance_experts(loads, table_->num_layers(), shape, BalancePolicy::kGlobal);
  FATHOM_CHECK(planned.has_value(), "{}", planned.error().message);
  ExpertLists lists = table_->lists();
  bool moves = false;
  for (int64_t layer = 0; layer < table_->num_layers(); ++layer) {
    const auto of_layer = std::span(loads).subspan(static_cast<size_t>(layer * shape.experts),
                                                   static_cast<size_t>(shape.experts));
    const double before = rank_balance(*table_, layer, of_layer).ratio();
    if (rank_balance(*planned, layer, of_layer).ratio() < before * kLeastGain) continue;
    RankLists& ranks = lists[static_cast<size_t>(layer)];
    for (int rank = 0; rank < table_->num_ranks(); ++rank) {
      const auto experts = planned->experts_of(layer, rank);
      ranks[static_cast<size_t>(rank)].assign(experts.begin(), experts.end());
    }
    moves = true;
  }
  return moves ? make_table(*table_, lists) : table_;
}

}  // namespace fathom
