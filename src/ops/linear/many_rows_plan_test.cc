#include "ops/linear/many_rows_plan.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "base/math.h"

namespace fathom::cuda {
namespace {

constexpr int kMultiprocessors = 132;

class ManyRowsPlanOf : public testing::TestWithParam<ManyRowsType> {};

TEST_P(ManyRowsPlanOf, TilesCoverTheProduct) {
  const auto tiles = many_rows_tiles(GetParam());
  for (const int64_t rows : {1, 65, 128, 200, 512, 1000, 4096, 8192}) {
    for (const int64_t n : {8, 64, 576, 2112, 3648, 102400}) {
      for (const int64_t batches : {1, 16}) {
        const ManyRowsPlan plan = plan_many_rows(
            {.rows = rows, .n = n, .k = 2048, .batches = batches, .type = GetParam()},
            kMultiprocessors);
        EXPECT_GE(int64_t{plan.row_tiles} * plan.tile.rows(), rows);
        EXPECT_GE(int64_t{plan.column_tiles} * plan.tile.columns, n);
        EXPECT_LT(int64_t{plan.row_tiles - 1} * plan.tile.rows(), rows);
        EXPECT_LT(int64_t{plan.column_tiles - 1} * plan.tile.columns, n);
        EXPECT_GE(plan.band, 1);
        EXPECT_GE(plan.num_blocks, plan.tile.split);
        EXPECT_LE(plan.num_blocks, kMultiprocessors);
        EXPECT_EQ(plan.num_blocks % plan.tile.split, 0);
        EXPECT_NE(std::ranges::find(tiles, plan.tile), tiles.end());
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, ManyRowsPlanOf,
                         testing::Values(ManyRowsType::kBF16, ManyRowsType::kScaledE4M3));

TEST(ManyRowsPlan, ScaledProductsHaveHalfTheSteps) {
  ManyRowsProblem problem = {.rows = 512, .n = 512, .k = 1024};
  EXPECT_EQ(problem.k_steps(), 16);
  problem.type = ManyRowsType::kScaledE4M3;
  EXPECT_EQ(problem.k_steps(), 8);
}

TEST(ManyRowsPlan, SplitsFindRoomForTheTilesOfAllBatches) {
  const ManyRowsTile split = {.groups = 1, .columns = 64, .split = 2};
  ManyRowsProblem problem = {.rows = 64, .n = 1024, .k = 2048};
  EXPECT_TRUE(can_be_planned(problem, split, kMultiprocessors));  // 16 tiles, 66 clusters
  problem.batches = 4;
  EXPECT_TRUE(can_be_planned(problem, split, kMultiprocessors));
  problem.batches = 5;
  EXPECT_FALSE(can_be_planned(problem, split, kMultiprocessors));
}

TEST(ManyRowsPlan, LargeProductsHaveLargeTiles) {
  const ManyRowsPlan plan = plan_many_rows({.rows = 8192, .n = 8192, .k = 8192}, kMultiprocessors);
  EXPECT_GE(plan.tile.rows() * plan.tile.columns, 128 * 256);
}

TEST(ManyRowsPlan, SmallProductsHaveTilesForAllMultiprocessors) {
  const ManyRowsPlan plan = plan_many_rows({.rows = 512, .n = 3648, .k = 2048}, kMultiprocessors);
  EXPECT_GE(plan.num_blocks, 100);
}

TEST(ManyRowsPlan, TheLargerOperandIsReadOnce) {
  // A band of rows reads all of W: with few rows of W, bands are of rows.
  const auto bands_of_columns = [](int64_t rows, int64_t n) {
    return plan_many_rows({.rows = rows, .n = n, .k = 2048}, kMultiprocessors).band_of_columns;
  };
  EXPECT_TRUE(bands_of_columns(2048, 102400));
  EXPECT_FALSE(bands_of_columns(65536, 2048));
}

}  // namespace
}  // namespace fathom::cuda
