#include "ops/moe/expert_draw.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <set>

namespace fathom {
namespace {

constexpr int32_t kExperts = 64;

// [expert] its tokens over all tokens.
std::vector<double> shares(Routing routing, int32_t experts_per_token, int32_t rows) {
  std::vector<double> result(kExperts);
  for (const int32_t id : draw_experts(routing, kExperts, experts_per_token, rows, 7)) {
    result[static_cast<size_t>(id)] += 1.0 / rows;
  }
  return result;
}

TEST(ExpertDraw, ARowsExpertsAreDistinctAndInRange) {
  for (const Routing routing : {Routing::kUniform, Routing::kEven, Routing::kZipf}) {
    const auto ids = draw_experts(routing, kExperts, 6, 500, 3);
    ASSERT_EQ(ids.size(), 3000u);
    for (auto row = ids.begin(); row != ids.end(); row += 6) {
      const std::set<int32_t> distinct(row, row + 6);
      ASSERT_EQ(distinct.size(), 6u);
      ASSERT_GE(*distinct.begin(), 0);
      ASSERT_LT(*distinct.rbegin(), kExperts);
    }
    EXPECT_EQ(draw_experts(routing, kExperts, 6, 500, 3), ids);
  }
}

TEST(ExpertDraw, UniformAndEvenGiveEachExpertAsMany) {
  for (const double share : shares(Routing::kEven, 6, 3200)) EXPECT_NEAR(share, 6.0 / 64, 1e-9);
  for (const double share : shares(Routing::kUniform, 6, 20000)) {
    EXPECT_NEAR(share, 6.0 / 64, 0.012);  // 5.8 deviations
  }
}

// With one expert a token the i-th most popular one has 1 / i over the sum of 1 to 1 / 64.
TEST(ExpertDraw, ZipfsSharesFallWithTheRank) {
  std::vector<double> drawn = shares(Routing::kZipf, 1, 100000);
  std::ranges::sort(drawn, std::greater<>());
  double sum = 0;
  for (int i = 1; i <= kExperts; ++i) sum += 1.0 / i;
  for (const size_t rank : {1u, 2u, 3u, 5u, 10u, 20u}) {
    EXPECT_NEAR(drawn[rank - 1], 1 / (static_cast<double>(rank) * sum), 0.006) << rank;
  }
}

// Who is popular depends on the seed, not on the expert's number.
TEST(ExpertDraw, ZipfsOrderIsRandom) {
  std::set<int32_t> most_popular;
  for (uint32_t seed = 0; seed < 20; ++seed) {
    std::vector<int> tokens(kExperts);
    for (const int32_t id : draw_experts(Routing::kZipf, kExperts, 1, 2000, seed)) {
      ++tokens[static_cast<size_t>(id)];
    }
    most_popular.insert(static_cast<int32_t>(std::ranges::max_element(tokens) - tokens.begin()));
  }
  EXPECT_GT(most_popular.size(), 10u);
}

}  // namespace
}  // namespace fathom
