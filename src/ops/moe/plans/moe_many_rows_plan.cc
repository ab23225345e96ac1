#include "ops/moe/plans/moe_many_rows_plan.h"

#include <algorithm>

#include "base/math.h"

namespace fathom::cuda {
namespace {

constexpr int kFewestTileTokens = 64;
constexpr int64_t kScaleBlock = 128;

}  // namespace

MoeManyRowsPlan plan_moe_many_rows(const MoeManyRowsSizes& sizes) {
  const int64_t pairs = sizes.rows * sizes.experts_per_token;
  const int64_t experts_met = std::min(sizes.num_experts, pairs);
  MoeManyRowsPlan plan;
  // 1.5 times an expert's average share of the rows: an estimate of the fullest experts.
  const int64_t most = 3 * pairs / (2 * std::max<int64_t>(sizes.num_experts, 1));
  plan.tile_tokens = most <= kFewestTileTokens      ? kFewestTileTokens
                     : most <= 128                  ? 128
                     : sizes.scaled && most <= 3072 ? 192
                                                    : 256;
  plan.one_row_tile_an_expert = most <= plan.tile_tokens;
  plan.sorted_rows = round_up(pairs + experts_met * (kExpertRowUnit - 1), kExpertRowUnit);
  // One partial tile for each expert; independent of the tile size, so that the bound grows with
  // the rows.
  plan.max_row_tiles = pairs / kFewestTileTokens + experts_met;
  const auto reserve = [&](int64_t bytes) {
    const int64_t at = plan.workspace_bytes;
    plan.workspace_bytes += round_up(bytes, 1024);
    return at;
  };
  plan.num_row_tiles_at = reserve(sizeof(int32_t));
  plan.tiles_taken_at = reserve(2 * sizeof(int32_t));
  plan.row_tiles_at = reserve(plan.max_row_tiles * static_cast<int64_t>(sizeof(ExpertRowTile)));
  plan.positions_at = reserve(pairs * static_cast<int64_t>(sizeof(int32_t)));
  plan.sorted_x_at = reserve(plan.sorted_rows * sizes.hidden * 2);
  const int64_t value_bytes = sizes.scaled ? 1 : 2;
  plan.activations_at = reserve(plan.sorted_rows * sizes.inter * value_bytes);
  plan.shared_activations_at = reserve(sizes.rows * sizes.shared_inter * value_bytes);
  plan.shared_result_at = reserve(sizes.shared_inter > 0 ? sizes.rows * sizes.hidden * 2 : 0);
  if (sizes.scaled) {
    const auto reserve_scales = [&](int64_t columns, int64_t rows) {
      return reserve(columns / kScaleBlock * rows * static_cast<int64_t>(sizeof(float)));
    };
    plan.shared_scales_stride = round_up(sizes.rows, 4);
    plan.x_scales_at = reserve_scales(sizes.hidden, plan.sorted_rows);
    plan.activation_scales_at = reserve_scales(sizes.inter, plan.sorted_rows);
    plan.shared_activation_scales_at =
        reserve_scales(sizes.shared_inter, plan.shared_scales_stride);
  }
  return plan;
}

}  // namespace fathom::cuda
