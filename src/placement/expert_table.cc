#include "placement/expert_table.h"

#define XXH_INLINE_ALL  // header only: nothing to link
#include <xxhash.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/math.h"
#include "placement/split.h"

namespace fathom {
namespace {

Result<> check_sizes(int64_t num_experts, int num_ranks, int64_t num_layers,
                     std::string_view where) {
  const auto check = [&](std::string_view name, int64_t value, int64_t most) -> Result<> {
    if (value >= 1 && value <= most) return {};
    return invalid("{}{} is {}, allowed are 1 to {}", where, name, value, most);
  };
  FATHOM_RETURN_IF_ERROR(check("num_experts", num_experts, kMaxTableExperts));
  FATHOM_RETURN_IF_ERROR(check("num_ranks", num_ranks, kMaxTableRanks));
  return check("layers: their number", num_layers, kMaxTableLayers);
}

// One layer's lists; adds its slots to `slots`.
Result<> check_layer(int64_t num_experts, int num_ranks, const ExpertLists& lists, size_t layer,
                     std::string_view where, int64_t& slots) {
  const RankLists& ranks = lists[layer];
  if (std::ssize(ranks) != num_ranks) {
    return invalid("{}layers[{}] has {} ranks, num_ranks is {}", where, layer, ranks.size(),
                   num_ranks);
  }
  std::vector<bool> has_copy(static_cast<size_t>(num_experts));
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    slots += std::ssize(ranks[rank]);
    if (slots > kMaxTableSlots) {
      return invalid("{}layers[{}]: {} slots in the layers so far, at most {} are allowed in all",
                     where, layer, slots, kMaxTableSlots);
    }
    for (size_t slot = 0; slot < ranks[rank].size(); ++slot) {
      const int32_t expert = ranks[rank][slot];
      if (expert < 0 || expert >= num_experts) {
        return invalid("{}layers[{}][{}][{}] is {}, experts are 0 to {}", where, layer, rank, slot,
                       expert, num_experts - 1);
      }
      has_copy[static_cast<size_t>(expert)] = true;
    }
  }
  const auto missing = std::find(has_copy.begin(), has_copy.end(), false);
  if (missing == has_copy.end()) return {};
  return invalid("{}layers[{}] has no copy of expert {}, each of the {} needs one", where, layer,
                 missing - has_copy.begin(), num_experts);
}

}  // namespace

Result<ExpertTable> ExpertTable::create(int64_t num_experts, int num_ranks,
                                        const ExpertLists& lists, std::string_view where) {
  FATHOM_RETURN_IF_ERROR(check_sizes(num_experts, num_ranks, std::ssize(lists), where));
  int64_t slots = 0;
  for (size_t layer = 0; layer < lists.size(); ++layer) {
    FATHOM_RETURN_IF_ERROR(check_layer(num_experts, num_ranks, lists, layer, where, slots));
  }
  return ExpertTable(num_experts, num_ranks, lists);
}

ExpertTable ExpertTable::contiguous(int64_t num_layers, int64_t num_experts, int num_ranks,
                                    int64_t redundant_experts) {
  FATHOM_CHECK(redundant_experts >= 0 && redundant_experts <= num_experts * (num_ranks - 1),
               "{} redundant copies of {} experts on {} ranks", redundant_experts, num_experts,
               num_ranks);
  RankLists ranks(static_cast<size_t>(num_ranks));
  for (int rank = 0; rank < num_ranks; ++rank) {
    const Slice own = split_units(num_experts, 1, num_ranks, rank);
    const Slice slots = split_units(num_experts + redundant_experts, 1, num_ranks, rank);
    for (int64_t slot = 0; slot < slots.count; ++slot) {
      const int64_t expert = (own.first + slot) % num_experts;
      ranks[static_cast<size_t>(rank)].push_back(static_cast<int32_t>(expert));
    }
  }
  const ExpertLists lists(static_cast<size_t>(num_layers), ranks);
  auto table = create(num_experts, num_ranks, lists, "");
  FATHOM_CHECK(table.has_value(), "{}", table.error().message);
  return *std::move(table);
}

ExpertTable ExpertTable::contiguous(const ModelConfig& config, const Placement& placement) {
  return contiguous(num_moe_layers(config, false), config.num_experts, placement.world(),
                    placement.redundant_experts);
}

ExpertTable::ExpertTable(int64_t num_experts, int num_ranks, const ExpertLists& checked)
    : num_layers_(std::ssize(checked)), num_experts_(num_experts), num_ranks_(num_ranks) {
  rank_begin_.push_back(0);
  copy_begin_.push_back(0);
  std::vector<std::vector<ExpertCopy>> copies(static_cast<size_t>(num_experts));
  for (const RankLists& ranks : checked) {
    for (auto& of_expert : copies) of_expert.clear();
    for (int32_t rank = 0; rank < num_ranks; ++rank) {
      const auto& slots = ranks[static_cast<size_t>(rank)];
      for (int32_t slot = 0; slot < std::ssize(slots); ++slot) {
        const int32_t expert = slots[static_cast<size_t>(slot)];
        copies[static_cast<size_t>(expert)].push_back({rank, slot});
      }
      experts_.insert(experts_.end(), slots.begin(), slots.end());
      rank_begin_.push_back(std::ssize(experts_));
    }
    for (const auto& of_expert : copies) {
      copies_.insert(copies_.end(), of_expert.begin(), of_expert.end());
      copy_begin_.push_back(std::ssize(copies_));
    }
  }
  const auto add = [this](const void* data, size_t bytes) {
    fingerprint_ = XXH3_64bits_withSeed(data, bytes, fingerprint_);
  };
  add(&num_experts_, sizeof num_experts_);
  add(&num_ranks_, sizeof num_ranks_);
  add(rank_begin_.data(), rank_begin_.size() * sizeof(int64_t));
  add(experts_.data(), experts_.size() * sizeof(int32_t));
}

std::span<const int32_t> ExpertTable::experts_of(int64_t layer, int rank) const {
  FATHOM_CHECK(layer >= 0 && layer < num_layers_ && rank >= 0 && rank < num_ranks_,
               "layer {} of {}, rank {} of {}", layer, num_layers_, rank, num_ranks_);
  const auto row = static_cast<size_t>(layer * num_ranks_ + rank);
  return {experts_.begin() + rank_begin_[row], experts_.begin() + rank_begin_[row + 1]};
}

std::span<const ExpertCopy> ExpertTable::copies_of(int64_t layer, int64_t expert) const {
  FATHOM_CHECK(layer >= 0 && layer < num_layers_ && expert >= 0 && expert < num_experts_,
               "layer {} of {}, expert {} of {}", layer, num_layers_, expert, num_experts_);
  const auto row = static_cast<size_t>(layer * num_experts_ + expert);
  return {copies_.begin() + copy_begin_[row], copies_.begin() + copy_begin_[row + 1]};
}

ExpertCopy ExpertTable::copy_for(int64_t layer, int64_t expert, int home_rank, int64_t row) const {
  const std::span<const ExpertCopy> copies = copies_of(layer, expert);
  const auto turn = static_cast<size_t>(expert + home_rank + row);
  return copies[turn % copies.size()];
}

int64_t ExpertTable::max_slots() const {
  int64_t most = 0;
  for (size_t i = 0; i + 1 < rank_begin_.size(); ++i) {
    most = std::max(most, rank_begin_[i + 1] - rank_begin_[i]);
  }
  return most;
}

RankLists ExpertTable::lists_of(int64_t layer) const {
  RankLists ranks;
  for (int rank = 0; rank < num_ranks_; ++rank) {
    const std::span<const int32_t> experts = experts_of(layer, rank);
    ranks.emplace_back(experts.begin(), experts.end());
  }
  return ranks;
}

ExpertLists ExpertTable::lists() const {
  ExpertLists lists;
  for (int64_t layer = 0; layer < num_layers_; ++layer) lists.push_back(lists_of(layer));
  return lists;
}

Result<> check_expert_table(const ExpertTable& table, const ModelConfig& config,
                            const Placement& placement, bool with_mtp) {
  const int64_t layers = num_moe_layers(config, with_mtp);
  if (table.num_layers() != layers) {
    return invalid("layers: there are {}, the model has {} layers with routed experts",
                   table.num_layers(), layers);
  }
  if (table.num_experts() != config.num_experts) {
    return invalid("num_experts is {}, the model has {} (n_routed_experts)", table.num_experts(),
                   config.num_experts);
  }
  if (table.num_ranks() != placement.world()) {
    return invalid("num_ranks is {}, the placement has tp * dp = {}", table.num_ranks(),
                   placement.world());
  }
  const int64_t slots = config.num_experts + placement.redundant_experts;
  const int64_t most = ceil_div(slots, placement.world());
  for (int64_t layer = 0; layer < layers; ++layer) {
    for (int rank = 0; rank < table.num_ranks(); ++rank) {
      const auto used = std::ssize(table.experts_of(layer, rank));
      if (used <= most) continue;
      return invalid(
          "layers[{}][{}] has {} experts, a rank has {} slots ({} experts and {} redundant_experts "
          "over {} ranks)",
          layer, rank, used, most, config.num_experts, placement.redundant_experts,
          placement.world());
    }
  }
  return {};
}

}  // namespace fathom
