#include "placement/eplb.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "base/check.h"
#include "placement/rank_balance.h"

namespace fathom {
namespace {

// Experts node by node, which hierarchical planning decides first: whole groups packed onto nodes.
std::vector<int32_t> order_by_node(std::span<const double> loads, const BalanceShape& shape) {
  const int64_t group_size = shape.experts / shape.groups;
  std::vector<double> group_loads(static_cast<size_t>(shape.groups));
  for (int64_t expert = 0; expert < shape.experts; ++expert) {
    group_loads[static_cast<size_t>(expert / group_size)] += loads[static_cast<size_t>(expert)];
  }
  const Packing nodes = pack_balanced(group_loads, shape.nodes);
  const int64_t groups_per_node = shape.groups / shape.nodes;
  std::vector<int32_t> order(static_cast<size_t>(shape.experts));
  for (size_t group = 0; group < group_loads.size(); ++group) {
    const int64_t first =
        (nodes.pack[group] * groups_per_node + nodes.position[group]) * group_size;
    std::iota(order.begin() + first, order.begin() + first + group_size,
              static_cast<int32_t>(static_cast<int64_t>(group) * group_size));
  }
  return order;
}

struct PlannedSlot {
  int32_t expert = 0;
  int32_t copy = 0;  // which of the expert's copies
};

// Replicates the experts of one node and packs the copies onto its GPUs. Returns the node's slots;
// their experts are indices into `loads`.
std::vector<PlannedSlot> balance_node(std::span<const double> loads, int64_t replicas,
                                      int64_t gpus) {
  const Replication replication = replicate(loads, replicas);
  std::vector<double> weights(static_cast<size_t>(replicas));
  for (size_t i = 0; i < weights.size(); ++i) {
    const auto expert = static_cast<size_t>(replication.expert[i]);
    weights[i] = loads[expert] / replication.copies[expert];
  }
  const Packing packing = pack_balanced(weights, gpus);
  const int64_t slots_per_gpu = replicas / gpus;
  std::vector<PlannedSlot> slots(static_cast<size_t>(replicas));
  for (size_t i = 0; i < weights.size(); ++i) {
    slots[static_cast<size_t>(packing.pack[i] * slots_per_gpu + packing.position[i])] = {
        replication.expert[i], replication.copy[i]};
  }
  return slots;
}

// The plan's three tables.
BalancePlan plan_of(const std::vector<PlannedSlot>& slots, int64_t experts) {
  BalancePlan plan;
  plan.copies.assign(static_cast<size_t>(experts), 0);
  for (const PlannedSlot& slot : slots) {
    plan.physical_to_logical.push_back(slot.expert);
    ++plan.copies[static_cast<size_t>(slot.expert)];
  }
  plan.max_copies = *std::max_element(plan.copies.begin(), plan.copies.end());
  plan.logical_to_physical.assign(static_cast<size_t>(experts * plan.max_copies), -1);
  for (size_t i = 0; i < slots.size(); ++i) {
    const int64_t entry = slots[i].expert * plan.max_copies + slots[i].copy;
    plan.logical_to_physical[static_cast<size_t>(entry)] = static_cast<int32_t>(i);
  }
  return plan;
}

// The experts of each GPU.
RankLists by_gpu(const BalancePlan& plan, int64_t gpus) {
  const auto slots = std::ssize(plan.physical_to_logical) / gpus;
  RankLists lists;
  for (int64_t gpu = 0; gpu < gpus; ++gpu) {
    const auto first = plan.physical_to_logical.begin() + gpu * slots;
    lists.emplace_back(first, first + slots);
  }
  return lists;
}

// The lightest pack that has room, the first of equals.
size_t lightest_with_room(const std::vector<double>& load, const std::vector<int32_t>& room) {
  size_t lightest = load.size();
  for (size_t pack = 0; pack < load.size(); ++pack) {
    if (room[pack] == 0) continue;
    if (lightest == load.size() || load[pack] < load[lightest]) lightest = pack;
  }
  return lightest;
}

}  // namespace

Packing pack_balanced(std::span<const double> weights, int64_t packs) {
  const auto items = std::ssize(weights);
  FATHOM_CHECK(packs > 0 && items % packs == 0, "{} items in {} packs", items, packs);
  const int64_t items_per_pack = items / packs;
  Packing packing{std::vector<int32_t>(weights.size()), std::vector<int32_t>(weights.size())};
  if (items_per_pack == 1) {
    std::iota(packing.pack.begin(), packing.pack.end(), 0);
    return packing;
  }
  std::vector<int32_t> order(weights.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return weights[static_cast<size_t>(a)] > weights[static_cast<size_t>(b)];
  });
  std::vector<double> load(static_cast<size_t>(packs));
  std::vector<int32_t> room(static_cast<size_t>(packs), static_cast<int32_t>(items_per_pack));
  for (const int32_t item : order) {
    const size_t pack = lightest_with_room(load, room);
    packing.pack[static_cast<size_t>(item)] = static_cast<int32_t>(pack);
    packing.position[static_cast<size_t>(item)] = static_cast<int32_t>(items_per_pack) - room[pack];
    load[pack] += weights[static_cast<size_t>(item)];
    --room[pack];
  }
  return packing;
}

Replication replicate(std::span<const double> loads, int64_t replicas) {
  const auto experts = std::ssize(loads);
  FATHOM_CHECK(experts > 0 && replicas >= experts, "{} replicas of {} experts", replicas, experts);
  Replication result;
  result.expert.resize(static_cast<size_t>(replicas));
  result.copy.resize(static_cast<size_t>(replicas));
  result.copies.assign(static_cast<size_t>(experts), 1);
  std::iota(result.expert.begin(), result.expert.begin() + experts, 0);
  std::vector<double> load_per_copy(loads.begin(), loads.end());
  for (auto i = static_cast<size_t>(experts); i < result.expert.size(); ++i) {
    const auto heaviest = static_cast<size_t>(
        std::max_element(load_per_copy.begin(), load_per_copy.end()) - load_per_copy.begin());
    result.expert[i] = static_cast<int32_t>(heaviest);
    result.copy[i] = result.copies[heaviest]++;
    load_per_copy[heaviest] = loads[heaviest] / result.copies[heaviest];
  }
  return result;
}

Result<> check_balance_shape(const BalanceShape& shape) {
  const auto check = [](const char* name, int64_t value, int64_t least, int64_t most) -> Result<> {
    if (value >= least && value <= most) return {};
    return invalid("{} is {}, allowed are {} to {}", name, value, least, most);
  };
  const auto divides = [](const char* name, int64_t value, const char* of,
                          int64_t whole) -> Result<> {
    if (whole % value == 0) return {};
    return invalid("{} is {}, it must be a multiple of {}, which is {}", of, whole, name, value);
  };
  FATHOM_RETURN_IF_ERROR(check("experts", shape.experts, 1, kMaxTableExperts));
  FATHOM_RETURN_IF_ERROR(check("gpus", shape.gpus, 1, kMaxTableRanks));
  FATHOM_RETURN_IF_ERROR(check("groups", shape.groups, 1, shape.experts));
  FATHOM_RETURN_IF_ERROR(check("nodes", shape.nodes, 1, shape.gpus));
  FATHOM_RETURN_IF_ERROR(
      check("replicas", shape.replicas, shape.experts, shape.experts * shape.gpus));
  FATHOM_RETURN_IF_ERROR(divides("gpus", shape.gpus, "replicas", shape.replicas));
  FATHOM_RETURN_IF_ERROR(divides("nodes", shape.nodes, "gpus", shape.gpus));
  return divides("groups", shape.groups, "experts", shape.experts);
}

BalancePlan balance_layer(std::span<const double> loads, const BalanceShape& shape,
                          BalancePolicy policy) {
  FATHOM_CHECK(std::ssize(loads) == shape.experts, "{} loads of {} experts", loads.size(),
               shape.experts);
  BalanceShape used = shape;
  if (policy == BalancePolicy::kGlobal || shape.groups % shape.nodes != 0) {
    used.groups = used.nodes = 1;
  }
  const std::vector<int32_t> order = order_by_node(loads, used);
  std::vector<double> ordered(loads.size());
  for (size_t i = 0; i < ordered.size(); ++i) {
    ordered[i] = loads[static_cast<size_t>(order[i])];
  }
  const int64_t experts_per_node = used.experts / used.nodes;
  std::vector<PlannedSlot> slots;
  slots.reserve(static_cast<size_t>(used.replicas));
  for (int64_t node = 0; node < used.nodes; ++node) {
    const auto first = static_cast<size_t>(node * experts_per_node);
    const auto of_node = std::span(ordered).subspan(first, static_cast<size_t>(experts_per_node));
    for (const PlannedSlot& slot :
         balance_node(of_node, used.replicas / used.nodes, used.gpus / used.nodes)) {
      slots.push_back({order[first + static_cast<size_t>(slot.expert)], slot.copy});
    }
  }
  return plan_of(slots, used.experts);
}

Result<ExpertTable> balance_experts(std::span<const double> loads, int64_t num_layers,
                                    const BalanceShape& shape, BalancePolicy policy) {
  FATHOM_RETURN_IF_ERROR(check_balance_shape(shape));
  FATHOM_CHECK(std::ssize(loads) == num_layers * shape.experts, "{} loads, {} layers of {} experts",
               loads.size(), num_layers, shape.experts);
  const bool can_go_without = shape.replicas > shape.experts && shape.experts % shape.gpus == 0;
  BalanceShape without = shape;
  without.replicas = shape.experts;
  ExpertLists lists;
  for (int64_t layer = 0; layer < num_layers; ++layer) {
    const auto of_layer = loads.subspan(static_cast<size_t>(layer * shape.experts),
                                        static_cast<size_t>(shape.experts));
    for (const double load : of_layer) {
      if (std::isfinite(load) && load >= 0) continue;
      return invalid("load {} of layer {} is not a finite number of at least 0", load, layer);
    }
    auto chosen = by_gpu(balance_layer(of_layer, shape, policy), shape.gpus);
    if (can_go_without) {
      auto packed = by_gpu(balance_layer(of_layer, without, policy), shape.gpus);
      if (rank_balance(packed, of_layer).max < rank_balance(chosen, of_layer).max) {
        chosen = std::move(packed);
      }
    }
    lists.push_back(std::move(chosen));
  }
  return ExpertTable::create(shape.experts, static_cast<int>(shape.gpus), lists, "");
}

}  // namespace fathom
