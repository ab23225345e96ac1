#include "placement/expert_balancer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace fathom {
namespace {

constexpr int64_t kLayers = 2, kExperts = 8;
constexpr int kRanks = 2;

std::shared_ptr<const ExpertTable> first_table(int64_t redundant = 0, int ranks = kRanks) {
  return std::make_shared<const ExpertTable>(
      ExpertTable::contiguous(kLayers, kExperts, ranks, redundant));
}

// The first rank's experts have all the tokens of layer 1; layer 0 is even.
const std::vector<int32_t> kSkewed = {1, 1, 1, 1, 1, 1, 1, 1, 9, 7, 5, 3, 0, 0, 0, 0};
const std::vector<int32_t> kEven = {2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2};

TEST(ExpertBalancer, MovesTheLayersThatGetBetter) {
  ExpertBalancer balancer(first_table(), 0, {.rebalances = true, .rebalance_steps = 3});
  for (int step = 1; step <= 2; ++step) {
    balancer.count(kSkewed);
    EXPECT_EQ(balancer.end_step(), nullptr) << step;
  }
  EXPECT_EQ(balancer.stats().window.worst_balance, 0.5);
  EXPECT_EQ(balancer.stats().window.worst_layer, 1);
  balancer.count(kSkewed);
  const auto table = balancer.end_step();
  ASSERT_NE(table, nullptr);
  EXPECT_EQ(table, balancer.table());
  EXPECT_EQ(balancer.stats().moves, 1);
  EXPECT_EQ(balancer.stats().window.balance, 1.0);
  const auto before = first_table();
  for (int rank = 0; rank < kRanks; ++rank) {
    const auto now = table->experts_of(0, rank), then = before->experts_of(0, rank);
    EXPECT_TRUE(std::equal(now.begin(), now.end(), then.begin(), then.end())) << "layer 0 moved";
    EXPECT_EQ(table->experts_of(1, rank).size(), static_cast<size_t>(kExperts / kRanks));
  }

  // Balanced experts stay, at each of the next plans.
  for (int step = 0; step < 9; ++step) {
    balancer.count(kSkewed);
    EXPECT_EQ(balancer.end_step(), nullptr);
  }
  EXPECT_EQ(balancer.stats().moves, 1);
}

// Layers move one after the other, and the next plan waits for the last of them.
TEST(ExpertBalancer, MovesALayerAStep) {
  std::vector<int32_t> skewed = kSkewed;
  std::copy(kSkewed.begin() + kExperts, kSkewed.end(), skewed.begin());
  ExpertBalancer at_once(first_table(), 0, {.rebalances = true, .rebalance_steps = 1});
  ExpertBalancer slow(first_table(), 0,
                      {.rebalances = true, .rebalance_steps = 1, .layers_a_step = 1});
  at_once.count(skewed);
  slow.count(skewed);
  const auto target = at_once.end_step(), first = slow.end_step();
  ASSERT_NE(first, nullptr);
  EXPECT_EQ(first->lists_of(0), target->lists_of(0));
  EXPECT_EQ(first->lists_of(1), first_table()->lists_of(1));
  EXPECT_EQ(slow.stats().table, first);
  // Loads that would ask for another plan.
  slow.count(std::vector<int32_t>(skewed.rbegin(), skewed.rend()));
  const auto second = slow.end_step();
  ASSERT_NE(second, nullptr);
  EXPECT_EQ(*second, *target);
  EXPECT_EQ(slow.stats().moves, 1);
}

TEST(ExpertBalancer, StaysWithoutAReason) {
  // Even loads, no loads at all, and a balancer that only counts.
  ExpertBalancer even(first_table(), 0, {.rebalances = true, .rebalance_steps = 1});
  ExpertBalancer idle(first_table(), 0, {.rebalances = true, .rebalance_steps = 1});
  ExpertBalancer counting(first_table(), 0, {.rebalance_steps = 1});
  for (int step = 0; step < 5; ++step) {
    even.count(kEven);
    EXPECT_EQ(even.end_step(), nullptr);
    EXPECT_EQ(idle.end_step(), nullptr);
    counting.count(kSkewed);
    EXPECT_EQ(counting.end_step(), nullptr);
  }
  EXPECT_EQ(counting.stats().window.worst_balance, 0.5);
}

// One expert has nearly all tokens: only copies of it help, as many as there is room for.
TEST(ExpertBalancer, CopiesAHeavyExpertWithinTheSlots) {
  const std::vector<int32_t> one = {1, 1, 1, 1, 90, 1, 1, 1, 1, 1, 1, 1, 90, 1, 1, 1};
  for (const int64_t redundant : {0, 2, 3}) {
    ExpertBalancer balancer(first_table(redundant, 3), redundant,
                            {.rebalances = true, .rebalance_steps = 1});
    const double before = [&] {
      balancer.count(one);
      const ExpertTable table = *balancer.table();
      ExpertLoad load(kLayers, kExperts, 1, 1);
      for (int64_t i = 0; i < kLayers * kExperts; ++i) {
        load.add(i / kExperts, i % kExperts, one[static_cast<size_t>(i)]);
      }
      return load.snapshot(table).balance;
    }();
    const auto table = balancer.end_step();
    ASSERT_NE(table, nullptr);
    balancer.count(one);
    EXPECT_GT(balancer.stats().window.balance, before * ExpertBalancer::kLeastGain);
    // 8 experts and their copies over 3 ranks.
    EXPECT_LE(table->max_slots(), redundant == 3 ? 4 : redundant == 2 ? 4 : 3);
    EXPECT_GE(table->copies_of(0, 4).size(), redundant == 0 ? 2u : 3u);
  }
}

// Tokens of several ranks add up, and a window forgets.
TEST(ExpertBalancer, CountsTheWindowsTokensOfAllRanks) {
  ExpertBalancer balancer(first_table(), 0, {.rebalance_steps = 2});
  balancer.count(kSkewed);
  balancer.count(kEven);
  balancer.end_step();
  EXPECT_EQ(balancer.stats().window.routed_tokens, 32 + 32);
  EXPECT_EQ(balancer.stats().layer_balance, std::vector<double>({1, 0.625}));
  for (int step = 0; step < 2; ++step) balancer.end_step();
  const ExpertStats stats = balancer.stats();
  EXPECT_EQ(stats.window.routed_tokens, 0);
  EXPECT_EQ(stats.layer_balance, std::vector<double>({1, 1}));
  EXPECT_EQ(stats.tokens, std::vector<int64_t>({3, 3, 3, 3, 3, 3, 3, 3, 11, 9, 7, 5, 2, 2, 2, 2}));
}

}  // namespace
}  // namespace fathom
