#include "ops/moe/plans/moe_few_rows_plan.h"

#include <algorithm>

#include "base/math.h"

namespace fathom::cuda {

int MoeFewRowsPlan::hidden_groups(int64_t hidden) const {
  return static_cast<int>(ceil_div(hidden / 8, clusters));
}

bool MoeFewRowsPlan::takes(const MoeFewRowsShape& shape) const {
  return hidden_groups(shape.hidden) <= 8 * warpgroups &&
         ring_bytes >= 2 * moe_stage_bytes(shape.rows, warpgroups);
}

namespace {

// The plan for e4m3, as measured (docs/kernels/scaled_moe.md). left: the room for a ring.
MoeFewRowsPlan scaled_plan(const MoeFewRowsShape& shape, int blocks, int64_t left_of_1,
                           int64_t left_of_2) {
  MoeFewRowsPlan plan;
  plan.blocks = blocks;
  // An expert's few columns of down are one or two stages, and each tile of tokens costs as much as
  // loading them: twice the weight rows halve the tiles. A single expert has enough columns for
  // both.
  constexpr int64_t kFewColumns = 512, kStages = 3;
  const bool is_wide = shape.num_experts == 1 ? shape.inter > 8 * kFewColumns
                                              : shape.inter <= kFewColumns && shape.rows > 2;
  const int64_t columns = ceil_div(shape.hidden / 8, blocks / 2);
  plan.warpgroups =
      is_wide && columns <= 16 && left_of_2 >= kStages * moe_stage_bytes(shape.rows, 2) ? 2 : 1;
  plan.splits = plan.warpgroups == 2 || ceil_div(shape.hidden / 8, blocks / 2) <= 8 ? 2 : 1;
  plan.clusters = static_cast<int>(std::min<int64_t>(blocks / plan.splits, shape.hidden / 8));
  const int64_t wanted = plan.warpgroups == 2 ? 128 * 1024
                         : shape.rows <= 32   ? (shape.inter <= kFewColumns ? 128 : 96) * 1024
                                              : left_of_1;
  plan.ring_bytes =
      static_cast<int>(std::min(plan.warpgroups == 2 ? left_of_2 : left_of_1, wanted));
  return plan;
}

}  // namespace

MoeFewRowsPlan plan_moe_few_rows(const MoeFewRowsShape& shape, const ClusterCounts& counts) {
  MoeFewRowsPlan plan;
  plan.blocks = counts.of_2 * 2;
  const int64_t pairs = shape.rows * shape.experts_per_token;
  // With many tokens an expert, two warpgroups halve the cost of loading tokens per weight, unless
  // their sums leave no room for a ring.
  plan.warpgroups = pairs > 16 * shape.num_experts ? 2 : 1;
  const auto left = [&](int warpgroups) {
    return kMoeSharedBytes -
           (shape.scaled
                ? scaled_moe_sum_bytes(shape.rows, warpgroups) + scaled_moe_table_bytes(pairs)
                : shape.rows * moe_sum_bytes(warpgroups) + moe_table_bytes(pairs));
  };
  if (left(2) < 4 * moe_stage_bytes(shape.rows, 2)) plan.warpgroups = 1;
  if (shape.scaled) return scaled_plan(shape, plan.blocks, left(1), left(2));
  // A cluster's share of the hidden columns must fit a wgmma; more splits make the share wider.
  for (const int splits : {2, 1}) {
    plan.splits = splits;
    plan.clusters = static_cast<int>(std::min<int64_t>(plan.blocks / splits, shape.hidden / 8));
    if (plan.hidden_groups(shape.hidden) <= 8 * plan.warpgroups) break;
  }
  // With few tokens the ring leaves room for a co-resident CTA of the next launch, whose first
  // weights arrive while this one ends.
  const int64_t most = left(plan.warpgroups), wanted = shape.rows <= 16 ? 128 * 1024 : most;
  plan.ring_bytes = static_cast<int>(std::min(most, wanted));
  return plan;
}

}  // namespace fathom::cuda
