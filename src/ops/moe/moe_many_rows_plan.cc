#include "ops/moe/moe_many_rows_plan.h"

#include <algorithm>

#include "base/math.h"

namespace fathom::cuda {

// Row tiles of 192 rows are for experts that have about as many: one tile each where others need
// two. Otherwise those of 128 are faster: their instructions read less of shared memory.
MoeManyRowsPlan plan_moe_many_rows(const MoeManyRowsSizes& sizes) {
  const int64_t pairs = sizes.rows * sizes.experts_per_token;
  const int64_t experts_met = std::min(sizes.num_experts, pairs);
  MoeManyRowsPlan plan;
  plan.tile_units = pairs > 2 * kExpertRowUnit * sizes.num_experts &&
                            pairs <= 3 * kExpertRowUnit * sizes.num_experts
                        ? 3
                        : 2;
  plan.sorted_rows = round_up(pairs + experts_met * (kExpertRowUnit - 1), kExpertRowUnit);
  // One that is not full for each expert.
  plan.max_row_tiles = pairs / (2 * kExpertRowUnit) + experts_met;
  const auto reserve = [&](int64_t bytes) {
    const int64_t at = plan.workspace_bytes;
    plan.workspace_bytes += round_up(bytes, 1024);
    return at;
  };
  plan.num_row_tiles_at = reserve(sizeof(int32_t));
  plan.row_tiles_at = reserve(plan.max_row_tiles * static_cast<int64_t>(sizeof(ExpertRowTile)));
  plan.positions_at = reserve(pairs * static_cast<int64_t>(sizeof(int32_t)));
  plan.sorted_x_at = reserve(plan.sorted_rows * sizes.hidden * 2);
  plan.activations_at = reserve(plan.sorted_rows * sizes.inter * 2);
  plan.shared_activations_at = reserve(sizes.rows * sizes.shared_inter * 2);
  plan.shared_result_at = reserve(sizes.shared_inter > 0 ? sizes.rows * sizes.hidden * 2 : 0);
  return plan;
}

}  // namespace fathom::cuda
