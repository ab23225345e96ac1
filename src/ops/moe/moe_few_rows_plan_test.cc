#include "ops/moe/moe_few_rows_plan.h"

#include <gtest/gtest.h>

#include "base/math.h"

namespace fathom::cuda {
namespace {

const MoeFewRowsShape kV2Lite = {1, 2048, 64, 6, 1408, 2816};
const MoeFewRowsShape kV3 = {1, 7168, 256, 8, 2048, 2048};
const MoeFewRowsShape kTiny = {1, 256, 16, 4, 128, 128};

TEST(MoeFewRowsPlan, FitsIntoSharedMemory) {
  for (MoeFewRowsShape shape : {kV2Lite, kV3, kTiny}) {
    for (const int64_t rows : {1, 16, 64, 200, 512}) {
      shape.rows = rows;
      const MoeFewRowsPlan plan = plan_moe_few_rows(shape, {});
      SCOPED_TRACE(testing::Message() << rows << " rows of " << shape.hidden);
      const int64_t groups = ceil_div(shape.hidden / 8, plan.down_clusters);
      EXPECT_LE(groups, 8 * plan.down_warpgroups);
      EXPECT_LE(plan.down_clusters, ClusterCounts().of(plan.down_splits));
      EXPECT_LE(rows * down_sum_bytes(plan.down_warpgroups) + plan.down_ring_bytes, 221 * 1024);
      EXPECT_GE(plan.down_ring_bytes, 2 * (groups + 8) * 2048);
      EXPECT_LE(plan.gate_ring_bytes, 200 * 1024);
    }
  }
}

TEST(MoeFewRowsPlan, KeepsMultiprocessorsEvenlyBusy) {
  for (const MoeFewRowsShape& shape : {kV2Lite, kV3}) {
    const MoeFewRowsPlan plan = plan_moe_few_rows(shape, {});
    const int64_t groups = ceil_div(shape.hidden / 8, plan.down_clusters);
    EXPECT_LE(static_cast<double>(groups * 132) / plan.down_splits,
              1.1 * static_cast<double>(shape.hidden) / 8);
  }
}

}  // namespace
}  // namespace fathom::cuda
