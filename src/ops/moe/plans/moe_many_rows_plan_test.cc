#include "ops/moe/plans/moe_many_rows_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "base/math.h"

namespace fathom::cuda {
namespace {

constexpr MoeManyRowsSizes kV2Lite = {.rows = 1000,
                                      .hidden = 2048,
                                      .num_experts = 64,
                                      .experts_per_token = 6,
                                      .inter = 1408,
                                      .shared_inter = 2816};

void expect_any_routing_fits(bool scaled) {
  std::mt19937 random(1);
  for (const int64_t rows : {1, 7, 100, 1000, 2000, 40'000}) {
    for (const uint32_t met : {1, 3, 64}) {
      MoeManyRowsSizes sizes = kV2Lite;
      sizes.rows = rows;
      sizes.scaled = scaled;
      const MoeManyRowsPlan plan = plan_moe_many_rows(sizes);
      std::vector<int64_t> counts(64);
      for (int64_t pair = 0; pair < rows * 6; ++pair) ++counts[random() % met];
      int64_t sorted = 0, tiles = 0;
      for (const int64_t count : counts) {
        const int64_t units = ceil_div(count, kExpertRowUnit);
        sorted += units * kExpertRowUnit;
        tiles += ceil_div(units, plan.tile_tokens / kExpertRowUnit);
      }
      EXPECT_LE(sorted, plan.sorted_rows);
      EXPECT_LE(tiles, plan.max_row_tiles);
    }
  }
}

TEST(MoeManyRowsPlan, AnyRoutingFits) {
  expect_any_routing_fits(false);
  expect_any_routing_fits(true);
}

TEST(MoeManyRowsPlan, PartsOfTheWorkspaceFollowOneAnother) {
  const MoeManyRowsPlan plan = plan_moe_many_rows(kV2Lite);
  const int64_t starts[] = {plan.num_row_tiles_at, plan.row_tiles_at,   plan.positions_at,
                            plan.sorted_x_at,      plan.activations_at, plan.shared_activations_at,
                            plan.shared_result_at, plan.workspace_bytes};
  EXPECT_TRUE(std::ranges::is_sorted(starts));
  for (const int64_t start : starts) EXPECT_EQ(start % 1024, 0);
  EXPECT_GE(plan.activations_at - plan.sorted_x_at, plan.sorted_rows * 2048 * 2);
  EXPECT_GE(plan.shared_activations_at - plan.activations_at, plan.sorted_rows * 1408 * 2);
}

TEST(MoeManyRowsPlan, MoreRowsNeedMore) {
  int64_t before = 0;
  for (int64_t rows = 1; rows < 3000; rows += 37) {
    MoeManyRowsSizes sizes = kV2Lite;
    sizes.rows = rows;
    const int64_t bytes = plan_moe_many_rows(sizes).workspace_bytes;
    EXPECT_GE(bytes, before);
    before = bytes;
  }
}

}  // namespace
}  // namespace fathom::cuda
