#include "ops/moe/moe_few_rows_plan.h"

#include <algorithm>

#include "base/math.h"

namespace fathom::cuda {

int MoeFewRowsPlan::hidden_groups(int64_t hidden) const {
  return static_cast<int>(ceil_div(hidden / 8, clusters));
}

MoeFewRowsPlan plan_moe_few_rows(const MoeFewRowsShape& shape, const ClusterCounts& counts) {
  MoeFewRowsPlan plan;
  plan.blocks = counts.of_2 * 2;
  const int64_t pairs = shape.rows * shape.experts_per_token;
  // With many tokens an expert, what their rows cost on the way to a multiprocessor is shared by
  // twice the weights; unless their sums then leave no room for a ring.
  plan.warpgroups = pairs > 16 * shape.num_experts ? 2 : 1;
  const auto left = [&](int warpgroups) {
    return kMoeSharedBytes -
           (shape.scaled
                ? scaled_moe_sum_bytes(shape.rows, warpgroups) + scaled_moe_table_bytes(pairs)
                : shape.rows * moe_sum_bytes(warpgroups) + moe_table_bytes(pairs));
  };
  if (left(2) < 4 * moe_stage_bytes(shape.rows, 2)) plan.warpgroups = 1;
  // A cluster's share of the hidden columns fits the instruction; fewer splits leave it narrow.
  for (const int splits : {2, 1}) {
    plan.splits = splits;
    plan.clusters = static_cast<int>(std::min<int64_t>(plan.blocks / splits, shape.hidden / 8));
    if (plan.hidden_groups(shape.hidden) <= 8 * plan.warpgroups) break;
  }
  // Few tokens: room beside it for a block of the next launch, whose first weights arrive while
  // this one ends.
  const int64_t most = left(plan.warpgroups), wanted = shape.rows <= 16 ? 128 * 1024 : most;
  plan.ring_bytes = static_cast<int>(std::min(most, wanted));
  return plan;
}

}  // namespace fathom::cuda
