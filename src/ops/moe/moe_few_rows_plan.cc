#include "ops/moe/moe_few_rows_plan.h"

#include <algorithm>

#include "base/math.h"

namespace fathom::cuda {
namespace {

constexpr int64_t kShared = 220 * 1024;  // of a multiprocessor, less what barriers and lists take
// Two launches' blocks beside one another: the next one's first weights arrive while this one ends.
constexpr int64_t kRing = 96 * 1024;

}  // namespace

MoeFewRowsPlan plan_moe_few_rows(const MoeFewRowsShape& shape, const ClusterCounts& counts) {
  MoeFewRowsPlan plan;
  const int64_t tokens =
      std::clamp<int64_t>(ceil_div(shape.rows * shape.experts_per_token, shape.num_experts), 1, 64);
  const bool few = shape.rows <= 16;
  plan.gate_blocks = counts.of_1;
  plan.gate_warpgroups = tokens > 16 ? 2 : 1;
  plan.gate_ring_bytes = static_cast<int>(few ? kRing : kShared - 24 * 1024);

  double least = 0;
  for (const int warpgroups : {1, 2}) {
    for (const int splits : {1, 2, 4, 8}) {
      const int64_t groups = shape.hidden / 8,
                    clusters = std::min<int64_t>(counts.of(splits), groups);
      const int64_t own = ceil_div(groups, clusters);
      const int64_t sums = shape.rows * down_sum_bytes(warpgroups);
      if (own > 8 * warpgroups || sums > kShared - 2 * (own + 8) * 2048) continue;
      // us for a stage of 128 columns: to read, to bring to the multiprocessor, to multiply.
      const double weights = static_cast<double>(own) * 2048;
      const double stage =
          std::max({weights / 31e3, (weights + static_cast<double>(tokens) * 256) / 42e3, 0.14});
      const double cost = stage / splits + (splits > 1 ? 0.001 : 0);
      if (least != 0 && cost >= least) continue;
      least = cost;
      plan.down_warpgroups = warpgroups;
      plan.down_splits = splits;
      plan.down_clusters = static_cast<int>(clusters);
      plan.down_ring_bytes = static_cast<int>((few ? kRing : kShared) - sums);
    }
  }
  return plan;
}

}  // namespace fathom::cuda
