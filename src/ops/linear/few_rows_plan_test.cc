#include "ops/linear/few_rows_plan.h"

#include <gtest/gtest.h>

namespace fathom::cuda {
namespace {

const FewRowsShape kShapes[] = {{1, 3648, 2048},    {1, 2048, 2048},   {1, 21888, 2048},
                                {1, 2048, 10944},   {1, 102400, 2048}, {1, 512, 128, 16},
                                {1, 128, 512, 128}, {1, 2112, 7168},   {1, 129280, 7168},
                                {1, 8, 64},         {1, 256, 256},     {1, 576, 256}};

TEST(FewRowsPlan, TakesAllRowsInTilesThatFit) {
  for (FewRowsShape shape : kShapes) {
    for (const int64_t rows : {1, 8, 9, 33, 64}) {
      shape.rows = rows;
      shape.scaled = rows % 2 == 0 && shape.batches == 1;
      const FewRowsPlan plan = plan_few_rows(shape, {});
      SCOPED_TRACE(testing::Message() << rows << " rows, [" << shape.n << ", " << shape.k << "]");
      EXPECT_GE(plan.columns, rows);
      EXPECT_LE(plan.clusters, shape.n / 8);
      EXPECT_LE(plan.tile_groups(shape.n), 8 * plan.warpgroups);
      EXPECT_GE(int64_t{plan.tiles(shape.n)} * plan.tile_groups(shape.n) * plan.clusters * 8,
                shape.n);
      EXPECT_GE(shape.k, (plan.splits - 1) * shape.stage_columns());
    }
  }
}

// An SM's shared memory, and what a launch takes of it.
TEST(FewRowsPlan, RingsFitSharedMemory) {
  for (FewRowsShape shape : kShapes) {
    for (const bool scaled : {false, true}) {
      shape.scaled = scaled;
      for (const int64_t rows : {1, 8, 9, 33, 64}) {
        shape.rows = rows;
        for (const int warpgroups : {1, 2}) {
          for (const int splits : {1, 2, 4, 8}) {
            const FewRowsPlan plan = plan_with(shape, {}, warpgroups, splits, true);
            EXPECT_GE(plan.stages(shape), 2);
            EXPECT_LE(plan.stages(shape) * plan.stage_bytes(shape) + plan.bytes_behind(shape),
                      227 * 1024);
          }
        }
      }
    }
  }
}

TEST(FewRowsPlan, RunsAllAtOnce) {
  for (const FewRowsShape& shape : kShapes) {
    const FewRowsPlan plan = plan_few_rows(shape, {});
    EXPECT_LE(shape.batches * plan.clusters, ClusterCounts().of(plan.splits));
  }
}

TEST(FewRowsPlan, KeepsMultiprocessorsEvenlyBusy) {
  for (const FewRowsShape& shape : kShapes) {
    const int64_t groups = shape.n / 8 * shape.batches;
    if (groups * shape.k * 16 < 8 << 20) continue;  // the launch overhead dominates
    const FewRowsPlan plan = plan_few_rows(shape, {});
    const double most =
        static_cast<double>(plan.tiles(shape.n)) * plan.tile_groups(shape.n) / plan.splits;
    EXPECT_LE(most * 132, static_cast<double>(groups) * 1.15) << shape.n << ", " << shape.k;
  }
}

TEST(FewRowsPlan, DependsOnTheShapeAlone) {
  const FewRowsPlan one = plan_few_rows({7, 3648, 2048}, {}),
                    other = plan_few_rows({7, 3648, 2048}, {});
  EXPECT_EQ(one.splits, other.splits);
  EXPECT_EQ(one.clusters, other.clusters);
  EXPECT_EQ(one.warpgroups, other.warpgroups);
}

TEST(FewRowsPlan, TheNextLaunchBeginsLateWhereAFewRingsHoldAll) {
  const auto begins_at = [](FewRowsShape shape) {
    return plan_few_rows(shape, {}).next_begins_at(shape);
  };
  EXPECT_GT(begins_at({.rows = 8, .n = 2048, .k = 10944}), 0);
  EXPECT_GT(begins_at({.rows = 1, .n = 24576, .k = 1536, .scaled = true}), 0);
  EXPECT_GT(begins_at({.rows = 1, .n = 2112, .k = 7168, .scaled = true}), 0);
  EXPECT_EQ(begins_at({.rows = 8, .n = 3648, .k = 2048}), 0);   // little more than a ring
  EXPECT_EQ(begins_at({.rows = 8, .n = 7168, .k = 16384}), 0);  // many rings
}

TEST(FewRowsPlan, FetchesWhereMuchIsLeftToRead) {
  const auto fetched = [](FewRowsShape shape) { return plan_few_rows(shape, {}).fetched(shape); };
  EXPECT_GT(fetched({.rows = 1, .n = 24576, .k = 1536, .scaled = true}), 0);
  EXPECT_GT(fetched({.rows = 32, .n = 18432, .k = 7168, .scaled = true}), 0);
  EXPECT_EQ(fetched({.rows = 1, .n = 3072, .k = 1536, .scaled = true}), 0);  // the ring holds all
  EXPECT_EQ(fetched({.rows = 1, .n = 2112, .k = 7168, .scaled = true}), 0);
}

}  // namespace
}  // namespace fathom::cuda
