// EPLB, the expert parallelism load balancer: chooses which experts get redundant copies and on
// which GPU each copy goes, so that GPUs compute about the same number of tokens.
//
// Source: the algorithm that DeepSeek published as EPLB (2025): greedy replication of the expert
// with the most load per copy, greedy packing of the heaviest item into the lightest pack, and
// both in two levels where groups of experts are to stay on one node. This is an implementation
// of that description.
//
// Pure functions of their arguments: equal inputs give equal plans. All loads are fp64.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "placement/expert_table.h"

namespace fathom {

// Items in packs of equal numbers of items.
struct Packing {
  std::vector<int32_t> pack;      // [items]
  std::vector<int32_t> position;  // [items] within the pack, in the order of packing
};

// Packs items, heaviest first (equal ones in order), each into the lightest pack that has room,
// the first of equals. One item a pack: item i is pack i. `packs` divides the number of items.
Packing pack_balanced(std::span<const double> weights, int64_t packs);

struct Replication {
  std::vector<int32_t> expert;  // [replicas] first one copy of each in order, then the further ones
  std::vector<int32_t> copy;    // [replicas] which copy of its expert this is, from 0
  std::vector<int32_t> copies;  // [experts]
};

// Gives each further copy to the expert with the most load per copy, the first of equals.
Replication replicate(std::span<const double> loads, int64_t replicas);

enum class BalancePolicy {
  kHierarchical,  // a group's experts and their copies stay on one node: prefill
  kGlobal,        // any expert anywhere: decoding over many nodes
};

struct BalanceShape {
  int64_t experts = 0;
  int64_t replicas = 0;  // physical slots of all GPUs, a multiple of gpus
  int64_t groups = 1;    // of consecutive experts; divides experts
  int64_t nodes = 1;     // divides gpus
  int64_t gpus = 1;      // ranks
};

// The plan of one layer.
struct BalancePlan {
  std::vector<int32_t> physical_to_logical;  // [replicas] GPU g has the g-th equal share
  std::vector<int32_t> logical_to_physical;  // [experts * max_copies] by copy, -1 behind the last
  std::vector<int32_t> copies;               // [experts]
  int64_t max_copies = 0;                    // the most that an expert has
};

// Refuses a shape that EPLB does not take; the sentence names field, value and limit. Loads
// must be finite and not negative.
Result<> check_balance_shape(const BalanceShape& shape);

// EPLB's plan for one layer's loads ([shape.experts], any unit, of a checked shape). Hierarchical
// becomes global where the nodes do not divide the groups.
BalancePlan balance_layer(std::span<const double> loads, const BalanceShape& shape,
                          BalancePolicy policy);

// The table of all layers, `loads` being [layers][shape.experts]. A layer that packing without
// redundant copies balances better (greedy replication can make it worse) leaves slots empty.
Result<ExpertTable> balance_experts(std::span<const double> loads, int64_t num_layers,
                                    const BalanceShape& shape, BalancePolicy policy);

}  // namespace fathom
