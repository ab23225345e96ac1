#include "ops/scaled_linear/scaled_absorb_plan.h"

#include <algorithm>

#include "base/math.h"

namespace fathom::cuda {
namespace {

constexpr int kMostTokens = 32, kFewTokens = 16;
constexpr int64_t kBlocksTogether = 2;  // CTAs of an SM: one computes while another waits

}  // namespace

ScaledAbsorbPlan plan_scaled_absorb(const ScaledAbsorbShape& shape, int num_multiprocessors) {
  ScaledAbsorbPlan plan;
  const auto tiles = [&] { return ceil_div(shape.rows, plan.tokens); };
  const auto fit = [&] {
    return shape.heads * plan.n_parts * tiles() <= kBlocksTogether * num_multiprocessors;
  };
  while (plan.tokens < std::min<int64_t>(shape.rows, kMostTokens)) plan.tokens *= 2;
  // First reduces the weights that each SM reads, then the rows.
  while (shape.splits_n && plan.n_parts < ScaledAbsorbPlan::kBlocks) {
    plan.n_parts *= 2;
    if (fit()) continue;
    plan.n_parts /= 2;
    break;
  }
  while (plan.tokens > kFewTokens) {
    plan.tokens /= 2;
    if (fit()) continue;
    plan.tokens *= 2;
    break;
  }
  const int64_t most = kBlocksTogether * num_multiprocessors / (shape.heads * plan.n_parts);
  plan.row_parts = static_cast<int>(std::clamp<int64_t>(most, 1, std::max<int64_t>(tiles(), 1)));
  return plan;
}

}  // namespace fathom::cuda
