#include "ops/moe/plans/moe_few_rows_plan.h"

#include <gtest/gtest.h>

namespace fathom::cuda {
namespace {

const MoeFewRowsShape kV2LiteShape = {1, 2048, 64, 6, 1408, 2816};
const MoeFewRowsShape kV3Shape = {1, 7168, 256, 8, 2048, 2048};
const MoeFewRowsShape kKimi = {1, 7168, 384, 8, 2048, 2048};
const MoeFewRowsShape kTiny = {1, 256, 16, 4, 128, 128};

TEST(MoeFewRowsPlan, FitsIntoSharedMemory) {
  for (MoeFewRowsShape shape : {kV2LiteShape, kV3Shape, kKimi, kTiny}) {
    for (const int64_t rows : {1, 16, 64, 200, 448}) {
      shape.rows = rows;
      const MoeFewRowsPlan plan = plan_moe_few_rows(shape, {});
      SCOPED_TRACE(testing::Message() << rows << " rows of " << shape.hidden);
      EXPECT_LE(plan.hidden_groups(shape.hidden), 8 * plan.warpgroups);
      EXPECT_LE(plan.clusters * plan.splits, plan.blocks);
      EXPECT_EQ(plan.blocks % plan.splits, 0);
      EXPECT_GE(plan.ring_bytes, 2 * moe_stage_bytes(rows, plan.warpgroups));
      EXPECT_LE(plan.ring_bytes + rows * moe_sum_bytes(plan.warpgroups) +
                    moe_table_bytes(rows * shape.experts_per_token),
                kMoeSharedBytes);
    }
  }
}

TEST(MoeFewRowsPlan, FitsIntoSharedMemoryInE4m3) {
  for (MoeFewRowsShape shape : {kV2LiteShape, kV3Shape, kKimi, kTiny}) {
    shape.scaled = true;
    for (const int64_t rows : {2, 16, 64, 200}) {
      shape.rows = rows;
      const MoeFewRowsPlan plan = plan_moe_few_rows(shape, {});
      SCOPED_TRACE(testing::Message() << rows << " rows of " << shape.hidden);
      EXPECT_LE(plan.hidden_groups(shape.hidden), 8 * plan.warpgroups);
      EXPECT_GE(plan.ring_bytes, 2 * moe_stage_bytes(rows, plan.warpgroups));
      EXPECT_LE(plan.ring_bytes + scaled_moe_sum_bytes(rows, plan.warpgroups) +
                    scaled_moe_table_bytes(rows * shape.experts_per_token),
                kMoeSharedBytes);
    }
  }
}

// CTAs count one another in memory that launches of different shapes share.
TEST(MoeFewRowsPlan, HasAsManyBlocksForEveryShape) {
  const int blocks = plan_moe_few_rows(kV2LiteShape, {}).blocks;
  EXPECT_EQ(plan_moe_few_rows(kV3Shape, {}).blocks, blocks);
  EXPECT_EQ(plan_moe_few_rows(kTiny, {}).blocks, blocks);
}

// An H20 has 78 SMs: too few for a cluster's share of V3's hidden columns to fit a wgmma.
TEST(MoeFewRowsPlan, SaysWhatDoesNotFit) {
  const ClusterCounts h20 = {78, 39, 18, 9};
  MoeFewRowsShape large = kV3Shape, at_limit = kV3Shape;
  large.hidden = int64_t{132} * 64 + 8;
  at_limit.hidden = int64_t{132} * 64;
  for (const bool scaled : {false, true}) {
    large.scaled = at_limit.scaled = scaled;
    MoeFewRowsShape v3 = kV3Shape, lite = kV2LiteShape;
    v3.scaled = lite.scaled = scaled;
    EXPECT_TRUE(plan_moe_few_rows(at_limit, {}).takes(at_limit));
    EXPECT_FALSE(plan_moe_few_rows(large, {}).takes(large));
    EXPECT_TRUE(plan_moe_few_rows(v3, {}).takes(v3));
    EXPECT_FALSE(plan_moe_few_rows(v3, h20).takes(v3));
    EXPECT_TRUE(plan_moe_few_rows(lite, h20).takes(lite));
  }
}

TEST(SmBudget, IsLimitedWithItsClusters) {
  const SmBudget half = SmBudget().limited_to(66);
  EXPECT_EQ(half.sms, 66);
  EXPECT_EQ(half.clusters.of_1, 66);
  EXPECT_EQ(half.clusters.of_2, 33);
  EXPECT_EQ(half.clusters.of_4, 16);
  EXPECT_EQ(half.clusters.of_8, 8);
  EXPECT_EQ(SmBudget().limited_to(1000).clusters.of_4, 30);
}

TEST(MoeFewRowsPlan, KeepsMultiprocessorsEvenlyBusy) {
  for (const MoeFewRowsShape& shape : {kV2LiteShape, kV3Shape}) {
    const MoeFewRowsPlan plan = plan_moe_few_rows(shape, {});
    EXPECT_LE(static_cast<double>(plan.hidden_groups(shape.hidden)) * 132 / plan.splits,
              1.1 * static_cast<double>(shape.hidden) / 8);
  }
}

}  // namespace
}  // namespace fathom::cuda
