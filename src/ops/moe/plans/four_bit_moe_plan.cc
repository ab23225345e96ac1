#include "ops/moe/plans/four_bit_moe_plan.h"

#include "base/math.h"
#include "ops/moe/plans/four_bit_tiles.h"

namespace fathom::cuda {

FourBitSlices plan_four_bit_slices(int64_t columns) {
  const int64_t blocks = columns / kFourBitBlockColumns;
  FourBitSlices plan;
  while (ceil_div(blocks, plan.slices) > kFourBitMostBlocks) plan.slices *= 2;
  plan.blocks = static_cast<int>(ceil_div(blocks, plan.slices));
  return plan;
}

FourBitFewRowsPlan plan_four_bit_few_rows(const FourBitMoeSizes& sizes) {
  constexpr int64_t kAlignment = 1024;
  const int64_t pairs = sizes.rows * sizes.experts_per_token;
  FourBitFewRowsPlan plan;
  plan.up = plan_four_bit_slices(sizes.hidden);
  plan.down = plan_four_bit_slices(sizes.inter);
  plan.results_at = round_up(pairs * sizes.inter * 2, kAlignment);
  plan.workspace_bytes = plan.results_at + round_up(pairs * sizes.hidden * 4, kAlignment);
  return plan;
}

}  // namespace fathom::cuda
