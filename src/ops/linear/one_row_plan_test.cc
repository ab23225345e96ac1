#include "ops/linear/one_row_plan.h"

#include <gtest/gtest.h>

namespace fathom::cuda {
namespace {

constexpr OneRowShape kOneRowShapes[] = {
    {3648, 2048}, {2048, 2048},  {512, 128, 16},  {128, 512, 16},  {102400, 2048},
    {2112, 7168}, {24576, 1536}, {512, 128, 128}, {128, 512, 128}, {7168, 16384},
    {8, 64},      {72, 64, 7},   {520, 4160, 3},  {200, 1088},     {8, 2112}};

TEST(OneRowPlan, UnitsAreWholeRowsOrPiecesOfOne) {
  for (const OneRowShape& shape : kOneRowShapes) {
    const OneRowPlan plan = plan_one_row(shape, 132);
    SCOPED_TRACE(testing::Message() << shape.n << " x " << shape.k);
    EXPECT_EQ(shape.n % plan.unit_rows, 0);
    EXPECT_TRUE(plan.unit_rows == 1 || plan.pieces == 1);
    EXPECT_GE(int64_t{plan.pieces} * OneRowPlan::kPieceColumns, shape.k);
    EXPECT_LE(plan.slot_bytes, 4096);
    EXPECT_LE(plan.warps, OneRowPlan::kMaxWarps);
    EXPECT_GE(plan.slots, 1);
    EXPECT_LE(plan.shared_bytes(shape), 160 * 1024);
  }
}

TEST(OneRowPlan, ABlockHasRoomForEveryBatchThatItSees) {
  for (const OneRowShape& shape : kOneRowShapes) {
    const OneRowPlan plan = plan_one_row(shape, 132);
    const int64_t units_a_batch = shape.n / plan.unit_rows, units = units_a_batch * shape.batches;
    EXPECT_LE(plan.blocks, units);
    for (int64_t block = 0; block < plan.blocks; ++block) {
      const int64_t first = units * block / plan.blocks;
      const int64_t last = units * (block + 1) / plan.blocks - 1;
      ASSERT_LE(last / units_a_batch - first / units_a_batch + 1, plan.batches_a_block)
          << shape.n << " x " << shape.k << ", block " << block;
    }
  }
}

TEST(OneRowPlan, PaysButForLargeMatricesOfShortRows) {
  EXPECT_TRUE(one_row_pays({3648, 2048}, 132));
  EXPECT_TRUE(one_row_pays({512, 128, 16}, 132));
  EXPECT_TRUE(one_row_pays({7168, 16384}, 132));
  EXPECT_FALSE(one_row_pays({24576, 1536}, 132));
  EXPECT_FALSE(one_row_pays({512, 128, 128}, 132));
}

TEST(OneRowPlan, AllOfASmallMatrixIsAskedForAtOnce) {
  for (const OneRowShape& shape : {OneRowShape{2048, 2048}, OneRowShape{512, 128, 16}}) {
    const OneRowPlan plan = plan_one_row(shape, 132);
    EXPECT_GE(plan.blocks * plan.warps * plan.slots * plan.unit_rows, shape.n * shape.batches);
  }
}

TEST(OneRowPlan, TheNextLaunchBeginsLateWhereSomeRingsHoldAll) {
  EXPECT_TRUE(plan_one_row({3648, 2048}, 132).next_begins_late);
  EXPECT_TRUE(plan_one_row({21888, 2048}, 132).next_begins_late);
  EXPECT_FALSE(plan_one_row({2048, 2048}, 132).next_begins_late);   // all loads are issued at once
  EXPECT_FALSE(plan_one_row({36864, 7168}, 132).next_begins_late);  // one ring is too little
}

}  // namespace
}  // namespace fathom::cuda
