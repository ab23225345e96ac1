#include "ops/scaled_linear/scaled_absorb_plan.h"

#include <gtest/gtest.h>

namespace fathom::cuda {
namespace {

constexpr int kMultiprocessors = 132;

ScaledAbsorbPlan plan(int64_t rows, int64_t heads, bool splits_n) {
  return plan_scaled_absorb({.rows = rows, .heads = heads, .splits_n = splits_n}, kMultiprocessors);
}

TEST(ScaledAbsorbPlan, IsOneWave) {
  for (const int64_t heads : {1, 8, 16, 64, 128}) {
    for (const int64_t rows : {1, 7, 8, 9, 64, 65, 500, 8192}) {
      for (const bool splits_n : {false, true}) {
        const ScaledAbsorbPlan p = plan(rows, heads, splits_n);
        EXPECT_LE(heads * p.n_parts * p.row_parts, 2 * kMultiprocessors);
        EXPECT_LE((p.row_parts - 1) * p.tokens, rows);
        EXPECT_TRUE(splits_n || p.n_parts == 1);
        EXPECT_EQ(p.blocks() * p.n_parts, ScaledAbsorbPlan::kBlocks);
      }
    }
  }
}

TEST(ScaledAbsorbPlan, WorksOnManyMultiprocessors) {
  EXPECT_EQ(plan(1, 16, true).n_parts, 4);
  EXPECT_EQ(plan(1, 128, true).n_parts, 2);
  EXPECT_EQ(plan(32, 128, true).n_parts, 2);
  EXPECT_EQ(plan(64, 128, true).tokens, 32);
  EXPECT_EQ(plan(64, 128, false).tokens, 32);
  EXPECT_EQ(plan(64, 128, false).row_parts, 2);
  EXPECT_EQ(plan(64, 16, false).tokens, 16);
  EXPECT_EQ(plan(64, 16, false).row_parts, 4);
  EXPECT_EQ(plan(8192, 128, false).row_parts, 2);
  EXPECT_EQ(plan(8192, 16, false).row_parts, 16);
}

// With more heads than co-resident CTAs, each head still has a CTA.
TEST(ScaledAbsorbPlan, OfAnyNumberOfHeads) { EXPECT_EQ(plan(100, 1000, true).row_parts, 1); }

}  // namespace
}  // namespace fathom::cuda
