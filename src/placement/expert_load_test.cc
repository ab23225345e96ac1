#include "placement/expert_load.h"

#include <gmock/gmock.h>

#include <deque>
#include <random>

namespace fathom {
namespace {

using testing::ElementsAre;

TEST(ExpertLoad, SlidesByPanes) {
  ExpertLoad load(1, 2, 3, 2);  // three panes of two steps
  const ExpertTable table = ExpertTable::contiguous(1, 2, 2);
  const auto tokens = [&] { return load.loads(); };
  // Step i routes 10^i tokens to expert 0 and one to expert 1.
  int64_t power = 1;
  for (int step = 0; step < 6; ++step, power *= 10) {
    load.add(0, 0, power);
    load.add(0, 1);
    EXPECT_EQ(load.snapshot(table).steps, step) << "the current step has not ended";
    if (step == 5) {
      EXPECT_THAT(tokens(), ElementsAre(111111, 6));
    }
    load.end_step();
  }
  // The first pane, steps 0 and 1, has made room for a new one.
  EXPECT_THAT(tokens(), ElementsAre(111100, 4));
  EXPECT_EQ(load.snapshot(table).steps, 4);
  load.end_step();
  EXPECT_THAT(tokens(), ElementsAre(111100, 4));
  load.end_step();
  EXPECT_THAT(tokens(), ElementsAre(110000, 2));
  for (int step = 0; step < 4; ++step) load.end_step();
  EXPECT_THAT(tokens(), ElementsAre(0, 0));
  EXPECT_EQ(load.snapshot(table).steps, 4);
}

TEST(ExpertLoad, OnePaneForgetsAtOnce) {
  ExpertLoad load(1, 1, 1, 2);
  load.add(0, 0, 5);
  load.end_step();
  EXPECT_THAT(load.loads(), ElementsAre(5));
  load.end_step();
  EXPECT_THAT(load.loads(), ElementsAre(0));
}

TEST(ExpertLoad, EqualsAWindowThatIsAddedUpAnew) {
  constexpr int64_t kThreeLayers = 3, kFiveExperts = 5, kPanes = 4;
  for (const int64_t steps_per_pane : {1, 3}) {
    ExpertLoad load(kThreeLayers, kFiveExperts, kPanes, steps_per_pane);
    std::deque<std::vector<double>> panes(1, std::vector<double>(kThreeLayers * kFiveExperts));
    std::mt19937 random(3);
    std::uniform_int_distribution<int64_t> layers(0, kThreeLayers - 1),
        experts(0, kFiveExperts - 1);
    for (int step = 1; step <= 100; ++step) {
      for (int token = 0; token < 20; ++token) {
        const int64_t layer = layers(random), expert = experts(random);
        load.add(layer, expert);
        ++panes.back()[static_cast<size_t>(layer * kFiveExperts + expert)];
      }
      std::vector<double> expected(kThreeLayers * kFiveExperts);
      for (const auto& pane : panes) {
        for (size_t i = 0; i < pane.size(); ++i) expected[i] += pane[i];
      }
      ASSERT_EQ(load.loads(), expected) << step;
      load.end_step();
      if (step % steps_per_pane == 0) panes.emplace_back(kThreeLayers * kFiveExperts);
      if (panes.size() > kPanes) panes.pop_front();
    }
  }
}

TEST(ExpertLoad, BalanceIsThatOfTheTable) {
  ExpertLoad load(2, 4, 2, 10);
  for (const auto& [expert, tokens] : {std::pair{0, 30}, {1, 10}, {2, 20}, {3, 20}}) {
    load.add(0, expert, tokens);
  }
  load.add(1, 3, 40);
  const ExpertTable plain = ExpertTable::contiguous(2, 4, 2);
  EXPECT_EQ(load.balance(plain, 0).ratio(), 1);
  EXPECT_EQ(load.balance(plain, 1).mean, 20);
  EXPECT_EQ(load.balance(plain, 1).max, 40);
  // A copy of expert 3 on each rank.
  const auto copied = ExpertTable::create(4, 2, {{{0, 1}, {2, 3}}, {{0, 3}, {1, 2, 3}}}, "");
  ASSERT_TRUE(copied);
  EXPECT_EQ(load.balance(*copied, 1).ratio(), 1);

  const ExpertLoadSnapshot snapshot = load.snapshot(plain);
  EXPECT_EQ(snapshot.routed_tokens, 120);
  EXPECT_EQ(snapshot.balance, 60.0 / 80.0);
  EXPECT_EQ(snapshot.worst_balance, 0.5);
  EXPECT_EQ(snapshot.worst_layer, 1);
  EXPECT_EQ(snapshot.heaviest_expert, 1);
}

TEST(ExpertLoad, WithoutTokensAllIsBalanced) {
  const ExpertLoad load(2, 4, 2, 10);
  const ExpertLoadSnapshot snapshot = load.snapshot(ExpertTable::contiguous(2, 4, 2));
  EXPECT_EQ(snapshot.steps, 0);
  EXPECT_EQ(snapshot.routed_tokens, 0);
  EXPECT_EQ(snapshot.balance, 1);
  EXPECT_EQ(snapshot.worst_balance, 1);
  EXPECT_EQ(snapshot.heaviest_expert, 0);
}

}  // namespace
}  // namespace fathom
