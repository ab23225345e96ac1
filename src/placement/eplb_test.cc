#include "placement/eplb.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <set>

#include "placement/rank_balance.h"

namespace fathom {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// The published example: 12 experts in 4 groups, 16 replicas on 8 GPUs of 2 nodes.
constexpr BalanceShape kExample{.experts = 12, .replicas = 16, .groups = 4, .nodes = 2, .gpus = 8};
const std::vector<double> kExampleLoads = {
    90, 132, 40,  61, 104, 165, 39,  4,   73,  56, 183, 86,  // layer 0
    20, 107, 104, 64, 19,  197, 187, 157, 172, 86, 16,  27,  // layer 1
};

std::span<const double> example_layer(size_t layer) {
  return std::span(kExampleLoads).subspan(layer * 12, 12);
}

RankLists lists_of(const BalancePlan& plan, int64_t gpus) {
  RankLists lists(static_cast<size_t>(gpus));
  const size_t slots = plan.physical_to_logical.size() / lists.size();
  for (size_t i = 0; i < plan.physical_to_logical.size(); ++i) {
    lists[i / slots].push_back(plan.physical_to_logical[i]);
  }
  return lists;
}

std::vector<double> gpu_loads(const BalancePlan& plan, std::span<const double> loads,
                              int64_t gpus) {
  std::vector<double> result;
  for (const auto& experts : lists_of(plan, gpus)) {
    double sum = 0;
    for (const int32_t expert : experts) {
      sum += loads[static_cast<size_t>(expert)] / plan.copies[static_cast<size_t>(expert)];
    }
    result.push_back(sum);
  }
  return result;
}

TEST(Eplb, PublishedExampleHierarchical) {
  const BalancePlan first = balance_layer(example_layer(0), kExample, BalancePolicy::kHierarchical);
  EXPECT_THAT(first.physical_to_logical,
              ElementsAre(5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1));
  EXPECT_THAT(gpu_loads(first, example_layer(0), 8),
              ElementsAre(121.5, 86.5, 125, 113, 147.5, 131.5, 156, 152));
  EXPECT_THAT(first.copies, ElementsAre(1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 2, 1));
  EXPECT_EQ(first.max_copies, 2);
  // By copy: the second copies of 1 and 4 are in lower slots than the first.
  EXPECT_THAT(first.logical_to_physical,
              ElementsAre(12, -1, 15, 13, 11, -1, 6, -1, 7, 5, 0, 2,  // experts 0 to 5
                          1, -1, 3, -1, 4, -1, 9, -1, 8, 10, 14, -1));

  const BalancePlan second =
      balance_layer(example_layer(1), kExample, BalancePolicy::kHierarchical);
  EXPECT_THAT(second.physical_to_logical,
              ElementsAre(7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1));
  EXPECT_THAT(gpu_loads(second, example_layer(1), 8),
              ElementsAre(173, 179.5, 120.5, 172, 123, 152, 118.5, 117.5));
}

TEST(Eplb, PublishedExampleGlobal) {
  const BalancePlan first = balance_layer(example_layer(0), kExample, BalancePolicy::kGlobal);
  const RankBalance first_balance = rank_balance(lists_of(first, 8), example_layer(0));
  EXPECT_EQ(first_balance.max, 138.5);
  EXPECT_NEAR(first_balance.ratio(), 0.932, 0.0005);
  EXPECT_THAT(first.physical_to_logical,
              ElementsAre(10, 6, 10, 7, 0, 2, 11, 4, 5, 9, 5, 4, 8, 3, 1, 1));
  const BalancePlan second = balance_layer(example_layer(1), kExample, BalancePolicy::kGlobal);
  const RankBalance second_balance = rank_balance(lists_of(second, 8), example_layer(1));
  EXPECT_EQ(second_balance.max, 172);
  EXPECT_NEAR(second_balance.ratio(), 0.840, 0.0005);
  EXPECT_THAT(second.physical_to_logical,
              ElementsAre(1, 10, 2, 4, 5, 11, 5, 0, 6, 7, 6, 3, 8, 8, 9, 7));
}

TEST(Eplb, HierarchicalIsGlobalWhereNodesDoNotDivideGroups) {
  BalanceShape shape = kExample;
  shape.groups = 3;
  EXPECT_EQ(
      balance_layer(example_layer(0), shape, BalancePolicy::kHierarchical).physical_to_logical,
      balance_layer(example_layer(0), kExample, BalancePolicy::kGlobal).physical_to_logical);
}

TEST(Eplb, PacksTheHeaviestIntoTheLightestPackThatHasRoom) {
  // 9 -> pack 0; 8 -> 1; 3 -> 1 (8 < 9), which is full; then 0 alone has room.
  const Packing packing = pack_balanced(std::vector<double>{3, 9, 8, 1}, 2);
  EXPECT_THAT(packing.pack, ElementsAre(1, 0, 1, 0));
  EXPECT_THAT(packing.position, ElementsAre(1, 0, 0, 1));
}

TEST(Eplb, PacksEqualItemsInOrder) {
  const Packing packing = pack_balanced(std::vector<double>(6, 5.0), 3);
  EXPECT_THAT(packing.pack, ElementsAre(0, 1, 2, 0, 1, 2));
  EXPECT_THAT(packing.position, ElementsAre(0, 0, 0, 1, 1, 1));
}

TEST(Eplb, OneItemAPackStaysInPlace) {
  const Packing packing = pack_balanced(std::vector<double>{1, 3, 2}, 3);
  EXPECT_THAT(packing.pack, ElementsAre(0, 1, 2));
  EXPECT_THAT(packing.position, ElementsAre(0, 0, 0));
}

TEST(Eplb, PacksLoadsWhoseSumIsInfinite) {
  const double huge = std::numeric_limits<double>::max();
  const Packing packing = pack_balanced(std::vector<double>(6, huge), 2);
  EXPECT_EQ(std::count(packing.pack.begin(), packing.pack.end(), 0), 3);
}

TEST(Eplb, ReplicatesTheHeaviestCopy) {
  // 90 becomes 45 twice, 60 becomes 30 twice, then 90 is 30 three times.
  const Replication result = replicate(std::vector<double>{10, 90, 60}, 6);
  EXPECT_THAT(result.expert, ElementsAre(0, 1, 2, 1, 2, 1));
  EXPECT_THAT(result.copy, ElementsAre(0, 0, 0, 1, 1, 2));
  EXPECT_THAT(result.copies, ElementsAre(1, 3, 2));
  // The first of equals.
  EXPECT_THAT(replicate(std::vector<double>{7, 7}, 3).expert, ElementsAre(0, 1, 0));
}

class RandomCases {
 public:
  explicit RandomCases(uint32_t seed) : random_(seed) {}

  int64_t pick(int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random_);
  }

  // Any shape that check_balance_shape() takes, G % N != 0 among them.
  BalanceShape shape() {
    BalanceShape shape;
    shape.nodes = pick(1, 4);
    shape.gpus = shape.nodes * pick(1, 4);
    shape.groups = pick(1, 8);
    shape.experts = shape.groups * pick(1, 6);
    const int64_t least = (shape.experts + shape.gpus - 1) / shape.gpus;
    shape.replicas = shape.gpus * pick(least, std::min(shape.experts, least + 3));
    return shape;
  }

  std::vector<double> loads(int64_t experts) {
    std::vector<double> loads(static_cast<size_t>(experts));
    const int64_t kind = pick(0, 5);
    const auto equal = static_cast<double>(pick(1, 100));
    std::lognormal_distribution<double> skewed(3, 1.5);
    for (double& load : loads) {
      if (kind == 1) load = equal;
      if (kind == 2) load = static_cast<double>(pick(0, 3));
      if (kind == 3) load = static_cast<double>(pick(0, 1'000'000));
      if (kind >= 4) load = skewed(random_);
    }
    if (kind == 5) loads[static_cast<size_t>(pick(0, experts - 1))] = 1e7;
    return loads;
  }

 private:
  std::mt19937 random_;
};

void check_tables(const BalancePlan& plan, const BalanceShape& shape) {
  ASSERT_EQ(std::ssize(plan.physical_to_logical), shape.replicas);
  std::map<int32_t, std::vector<int32_t>> slots;
  for (int32_t slot = 0; slot < shape.replicas; ++slot) {
    slots[plan.physical_to_logical[static_cast<size_t>(slot)]].push_back(slot);
  }
  ASSERT_EQ(std::ssize(slots), shape.experts) << "every expert has a copy";
  ASSERT_EQ(slots.begin()->first, 0);
  ASSERT_EQ(slots.rbegin()->first, shape.experts - 1);
  int64_t sum = 0, most = 0;
  for (const auto& [expert, of_expert] : slots) {
    const int64_t copies = plan.copies[static_cast<size_t>(expert)];
    ASSERT_EQ(copies, std::ssize(of_expert));
    sum += copies;
    most = std::max(most, copies);
    const auto row = plan.logical_to_physical.begin() + expert * plan.max_copies;
    ASSERT_TRUE(std::is_permutation(row, row + copies, of_expert.begin(), of_expert.end()));
    ASSERT_EQ(std::count(row, row + plan.max_copies, -1), plan.max_copies - copies);
  }
  ASSERT_EQ(sum, shape.replicas);
  ASSERT_EQ(most, plan.max_copies);
}

// A node's experts are whole groups, the same number on each node; all copies are there.
void check_groups_stay_on_nodes(const BalancePlan& plan, const BalanceShape& shape) {
  std::map<int64_t, std::set<int64_t>> nodes_of_group;
  std::map<int64_t, std::set<int64_t>> groups_of_node;
  for (int64_t slot = 0; slot < shape.replicas; ++slot) {
    const int64_t node = slot / (shape.replicas / shape.nodes);
    const int64_t group =
        plan.physical_to_logical[static_cast<size_t>(slot)] / (shape.experts / shape.groups);
    nodes_of_group[group].insert(node);
    groups_of_node[node].insert(group);
  }
  for (const auto& [group, nodes] : nodes_of_group) ASSERT_EQ(nodes.size(), 1u) << group;
  for (const auto& [node, groups] : groups_of_node) {
    ASSERT_EQ(std::ssize(groups), shape.groups / shape.nodes) << node;
  }
}

// Greedy replication is the best there is for the heaviest copy: nobody's last further copy was
// given while another expert's copies were heavier.
void check_copies_go_to_the_heaviest(const BalancePlan& plan, std::span<const double> loads,
                                     const std::vector<int64_t>& experts) {
  double heaviest = 0, lightest_before = std::numeric_limits<double>::infinity();
  for (const int64_t expert : experts) {
    const double load = loads[static_cast<size_t>(expert)];
    const int32_t copies = plan.copies[static_cast<size_t>(expert)];
    heaviest = std::max(heaviest, load / copies);
    if (copies > 1) lightest_before = std::min(lightest_before, load / (copies - 1));
  }
  ASSERT_LE(heaviest, lightest_before);
}

TEST(Eplb, InvariantsOnTenThousandRandomCases) {
  RandomCases random(1);
  int64_t hierarchical = 0, fallen_back = 0;
  for (int i = 0; i < 10'000; ++i) {
    const BalanceShape shape = random.shape();
    ASSERT_TRUE(check_balance_shape(shape)) << check_balance_shape(shape).error().message;
    const std::vector<double> loads = random.loads(shape.experts);
    SCOPED_TRACE(fmt::format("case {}: {} experts, {} replicas, {} groups, {} nodes, {} GPUs", i,
                             shape.experts, shape.replicas, shape.groups, shape.nodes, shape.gpus));
    for (const auto policy : {BalancePolicy::kHierarchical, BalancePolicy::kGlobal}) {
      const BalancePlan plan = balance_layer(loads, shape, policy);
      ASSERT_NO_FATAL_FAILURE(check_tables(plan, shape));
      const bool by_node =
          policy == BalancePolicy::kHierarchical && shape.groups % shape.nodes == 0;
      if (by_node) {
        ASSERT_NO_FATAL_FAILURE(check_groups_stay_on_nodes(plan, shape));
      }
      const int64_t nodes = by_node ? shape.nodes : 1;
      std::map<int64_t, std::set<int64_t>> experts;
      for (int64_t slot = 0; slot < shape.replicas; ++slot) {
        experts[slot / (shape.replicas / nodes)].insert(
            plan.physical_to_logical[static_cast<size_t>(slot)]);
      }
      for (const auto& [node, of_node] : experts) {
        ASSERT_NO_FATAL_FAILURE(check_copies_go_to_the_heaviest(
            plan, loads, std::vector<int64_t>(of_node.begin(), of_node.end())));
      }
      const BalancePlan again = balance_layer(loads, shape, policy);
      ASSERT_EQ(again.physical_to_logical, plan.physical_to_logical);
      (by_node ? hierarchical : fallen_back) += policy == BalancePolicy::kHierarchical ? 1 : 0;
    }
  }
  EXPECT_GT(hierarchical, 1000);
  EXPECT_GT(fallen_back, 1000);
}

TEST(Eplb, TableHasThePlansOfItsLayers) {
  const auto table = balance_experts(kExampleLoads, 2, kExample, BalancePolicy::kHierarchical);
  ASSERT_TRUE(table) << table.error().message;
  EXPECT_EQ(table->num_layers(), 2);
  EXPECT_EQ(table->num_ranks(), 8);
  EXPECT_THAT(table->experts_of(0, 0), ElementsAre(5, 6));
  EXPECT_THAT(table->experts_of(1, 7), ElementsAre(3, 1));
  EXPECT_THAT(table->copies_of(0, 10), ElementsAre(ExpertCopy{4, 0}, ExpertCopy{5, 0}));
}

TEST(Eplb, TableLeavesRedundantCopiesOutWhereTheyMakeALayerWorse) {
  RandomCases random(2);
  int64_t without_copies = 0;
  for (int i = 0; i < 500; ++i) {
    const BalanceShape shape{.experts = 64, .replicas = 72, .gpus = 8};
    BalanceShape without = shape;
    without.replicas = 64;
    std::vector<double> loads(64);
    for (double& load : loads) load = static_cast<double>(random.pick(50, 200));
    const auto table = balance_experts(loads, 1, shape, BalancePolicy::kGlobal);
    ASSERT_TRUE(table);
    const auto max_of = [&](const BalanceShape& used) {
      return rank_balance(lists_of(balance_layer(loads, used, BalancePolicy::kGlobal), 8), loads)
          .max;
    };
    const double max = rank_balance(*table, 0, loads).max;
    ASSERT_EQ(max, std::min(max_of(shape), max_of(without)));
    without_copies += max < max_of(shape) ? 1 : 0;
    ASSERT_EQ(table->max_slots(), max < max_of(shape) ? 8 : 9);
  }
  EXPECT_GT(without_copies, 0) << "no case in which copies make it worse";
}

TEST(Eplb, RefusesShapesByFieldValueAndLimit) {
  const auto expect_refused = [](BalanceShape shape, const std::string& sentence) {
    const auto checked = check_balance_shape(shape);
    ASSERT_FALSE(checked) << sentence;
    EXPECT_EQ(checked.error().message, sentence);
    EXPECT_FALSE(balance_experts({}, 0, shape, BalancePolicy::kGlobal));
  };
  BalanceShape shape = kExample;
  shape.replicas = 17;
  expect_refused(shape, "replicas is 17, it must be a multiple of gpus, which is 8");
  shape.replicas = 8;
  expect_refused(shape, "replicas is 8, allowed are 12 to 96");
  shape.replicas = 104;
  expect_refused(shape, "replicas is 104, allowed are 12 to 96");
  shape = kExample;
  shape.nodes = 3;
  expect_refused(shape, "gpus is 8, it must be a multiple of nodes, which is 3");
  shape.nodes = 9;
  expect_refused(shape, "nodes is 9, allowed are 1 to 8");
  shape = kExample;
  shape.groups = 5;
  expect_refused(shape, "experts is 12, it must be a multiple of groups, which is 5");
  shape.groups = 0;
  expect_refused(shape, "groups is 0, allowed are 1 to 12");
  shape = kExample;
  shape.gpus = 0;
  expect_refused(shape, "gpus is 0, allowed are 1 to 1024");
  shape.gpus = 1025;
  expect_refused(shape, "gpus is 1025, allowed are 1 to 1024");
  shape = kExample;
  shape.experts = 0;
  expect_refused(shape, "experts is 0, allowed are 1 to 16384");
}

TEST(Eplb, RefusesLoadsThatAreNotCounts) {
  for (const double wrong : {-1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    std::vector<double> loads = kExampleLoads;
    loads[20] = wrong;
    const auto table = balance_experts(loads, 2, kExample, BalancePolicy::kGlobal);
    ASSERT_FALSE(table);
    EXPECT_THAT(table.error().message, HasSubstr(fmt::format("load {} of layer 1", wrong)));
  }
}

TEST(RankBalance, CopiesShareAnExpertsLoad) {
  const std::vector<double> loads = {10, 4, 0};
  const RankBalance balance = rank_balance(RankLists{{0, 1}, {0}, {2, 0, 0}}, loads);
  EXPECT_DOUBLE_EQ(balance.mean, 14.0 / 3);
  EXPECT_DOUBLE_EQ(balance.max, 6.5);
  EXPECT_DOUBLE_EQ(balance.ratio(), 14.0 / 3 / 6.5);
  EXPECT_EQ(rank_balance(RankLists{{0}, {1, 2}}, std::vector<double>(3)).ratio(), 1);
}

}  // namespace
}  // namespace fathom
