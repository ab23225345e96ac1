#include "ops/linear/few_rows_plan.h"

#include <algorithm>

#include "base/math.h"

namespace fathom::cuda {
int FewRowsPlan::tiles(int64_t n) const {
  return static_cast<int>(ceil_div(ceil_div(n / 8, clusters), warpgroups * 8));
}

int FewRowsPlan::tile_groups(int64_t n) const {
  return static_cast<int>(ceil_div(ceil_div(n / 8, clusters), tiles(n)));
}

double few_rows_cost(const FewRowsShape& shape, const FewRowsPlan& plan,
                     const ClusterCounts& counts) {
  // Bytes / us that one of 132 multiprocessors reads from memory, and from the L2.
  constexpr double kMemory = 31e3, kCache = 42e3;
  constexpr double kTile = 0.25, kSplit = 0.8;  // us: a tile's end, and its joining
  const auto groups = static_cast<double>(ceil_div(shape.n / 8, plan.clusters));
  const auto columns = static_cast<double>(ceil_div(ceil_div(shape.k, 64), plan.splits) * 64);
  const double tiles = plan.tiles(shape.n);
  const double waves =
      static_cast<double>(ceil_div(shape.batches * plan.clusters, counts.of(plan.splits)));
  const double weights = groups * 8 * columns * 2;
  const double tokens = tiles * plan.columns * columns * 2;
  // A stage's way through the tensor cores takes its time whatever it holds.
  const double stages = tiles * columns / 128 * 0.14;
  const double exchange =
      plan.splits == 1 ? 0 : tiles * (kSplit + plan.warpgroups * 64 * plan.columns * 4 / kCache);
  return waves * (std::max({weights / kMemory, (weights + tokens) / kCache, stages}) +
                  tiles * kTile + exchange);
}

FewRowsPlan plan_with(const FewRowsShape& shape, const ClusterCounts& counts, int warpgroups,
                      int splits) {
  const int64_t clusters = counts.of(splits) / shape.batches;
  FewRowsPlan plan = {.warpgroups = warpgroups,
                      .splits = splits,
                      .clusters = static_cast<int>(std::clamp<int64_t>(clusters, 1, shape.n / 8))};
  while (plan.columns < shape.rows) plan.columns *= 2;
  return plan;
}

FewRowsPlan plan_few_rows(const FewRowsShape& shape, const ClusterCounts& counts) {
  FewRowsPlan best;
  double least = 0;
  for (const int warpgroups : {1, 2}) {
    for (const int splits : {1, 2, 4, 8}) {
      if (splits > 1 && shape.k < splits * 128) continue;
      const FewRowsPlan plan = plan_with(shape, counts, warpgroups, splits);
      const double cost = few_rows_cost(shape, plan, counts);
      if (least == 0 || cost < least) {
        best = plan;
        least = cost;
      }
    }
  }
  return best;
}

}  // namespace fathom::cuda
