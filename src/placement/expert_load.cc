#include "placement/expert_load.h"

#include <algorithm>

#include "base/check.h"

namespace fathom {

ExpertLoad::ExpertLoad(int64_t num_layers, int64_t num_experts, int64_t panes,
                       int64_t steps_per_pane)
    : num_layers_(num_layers),
      num_experts_(num_experts),
      panes_(panes),
      steps_per_pane_(steps_per_pane) {
  FATHOM_CHECK(num_layers > 0 && num_experts > 0 && panes > 0 && steps_per_pane > 0,
               "{} layers of {} experts, {} panes of {} steps", num_layers, num_experts, panes,
               steps_per_pane);
  closed_.resize(static_cast<size_t>(num_layers * num_experts));
  counts_.resize(static_cast<size_t>(panes) * closed_.size());
}

void ExpertLoad::end_step() {
  if (++steps_in_pane_ < steps_per_pane_) return;
  // The current pane joins the sums. The next one, the oldest, leaves them and becomes current.
  const auto size = std::ssize(closed_);
  const int64_t next = (pane_begin_ + size) % std::ssize(counts_);
  for (int64_t i = 0; i < size; ++i) {
    int64_t& oldest = counts_[static_cast<size_t>(next + i)];
    closed_[static_cast<size_t>(i)] += counts_[static_cast<size_t>(pane_begin_ + i)] - oldest;
    oldest = 0;
  }
  pane_begin_ = next;
  closed_panes_ = std::min(closed_panes_ + 1, panes_ - 1);
  steps_in_pane_ = 0;
}

int64_t ExpertLoad::tokens(int64_t layer, int64_t expert) const {
  const int64_t i = layer * num_experts_ + expert;
  return closed_[static_cast<size_t>(i)] + counts_[static_cast<size_t>(pane_begin_ + i)];
}

std::vector<double> ExpertLoad::loads_of(int64_t layer) const {
  std::vector<double> loads;
  loads.reserve(static_cast<size_t>(num_experts_));
  for (int64_t expert = 0; expert < num_experts_; ++expert) {
    loads.push_back(static_cast<double>(tokens(layer, expert)));
  }
  return loads;
}

std::vector<double> ExpertLoad::loads() const {
  std::vector<double> loads;
  loads.reserve(closed_.size());
  for (int64_t layer = 0; layer < num_layers_; ++layer) {
    const std::vector<double> of_layer = loads_of(layer);
    loads.insert(loads.end(), of_layer.begin(), of_layer.end());
  }
  return loads;
}

RankBalance ExpertLoad::balance(const ExpertTable& table, int64_t layer) const {
  FATHOM_CHECK(table.num_layers() == num_layers_, "{} layers, the table has {}", num_layers_,
               table.num_layers());
  return rank_balance(table, layer, loads_of(layer));
}

ExpertLoadSnapshot ExpertLoad::snapshot(const ExpertTable& table) const {
  ExpertLoadSnapshot snapshot;
  snapshot.steps = closed_panes_ * steps_per_pane_ + steps_in_pane_;
  RankBalance sum;
  for (int64_t layer = 0; layer < num_layers_; ++layer) {
    const RankBalance of_layer = balance(table, layer);
    sum.mean += of_layer.mean;
    sum.max += of_layer.max;
    if (of_layer.ratio() < snapshot.worst_balance) {
      snapshot.worst_balance = of_layer.ratio();
      snapshot.worst_layer = layer;
    }
    int64_t in_layer = 0, heaviest = 0;
    for (int64_t expert = 0; expert < num_experts_; ++expert) {
      in_layer += tokens(layer, expert);
      heaviest = std::max(heaviest, tokens(layer, expert));
    }
    snapshot.routed_tokens += in_layer;
    if (in_layer > 0) {
      const double share = static_cast<double>(heaviest) / static_cast<double>(in_layer);
      snapshot.heaviest_expert = std::max(snapshot.heaviest_expert, share);
    }
  }
  snapshot.balance = sum.ratio();
  return snapshot;
}

}  // namespace fathom
