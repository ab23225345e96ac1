#include "ops/linear/few_rows_plan.h"

#include <algorithm>

#include "base/math.h"

namespace fathom::cuda {
namespace {

constexpr int kGroupBytes = 8 * 256;  // 8 rows of a stage
// A CTA's shared memory: all of the SM's, or so much that two launches' CTAs fit into an SM and the
// next launch's first weights arrive while this one ends.
constexpr int kMostBytes = 227 * 1024, kHalfBytes = 112 * 1024;
constexpr int kBarrierBytes = (2 * FewRowsPlan::kMaxStages + 2) * 8;

int64_t token_groups(const FewRowsShape& shape) { return ceil_div(shape.rows, 8); }

// Stages of a CTA for one tile.
int64_t tile_stages(const FewRowsShape& shape, const FewRowsPlan& plan) {
  return ceil_div(ceil_div(shape.k, shape.stage_columns()), plan.splits);
}

}  // namespace

int FewRowsPlan::tiles(int64_t n) const {
  return static_cast<int>(ceil_div(ceil_div(n / 8, clusters), warpgroups * 8));
}

int FewRowsPlan::tile_groups(int64_t n) const {
  return static_cast<int>(ceil_div(ceil_div(n / 8, clusters), tiles(n)));
}

int FewRowsPlan::exchange_bytes(int64_t n) const {
  return splits == 1 ? 0 : std::min(tiles(n), 2) * warpgroups * 64 * columns * 4;
}

int FewRowsPlan::stage_bytes(const FewRowsShape& shape) const {
  return static_cast<int>(token_groups(shape) + tile_groups(shape.n)) * kGroupBytes;
}

int FewRowsPlan::token_scale_bytes(const FewRowsShape& shape) const {
  constexpr int64_t kBoxAlignment = 128;
  return shape.scaled ? static_cast<int>(round_up(token_groups(shape) * 2 * 8 * 4, kBoxAlignment))
                      : 0;
}

int FewRowsPlan::tile_scale_bytes(const FewRowsShape& shape) const {
  // Two blocks of 128 rows, two k blocks a stage.
  return shape.scaled ? static_cast<int>(tile_stages(shape, *this)) * 2 * 2 * 4 : 0;
}

int FewRowsPlan::bytes_behind(const FewRowsShape& shape) const {
  const int read =
      (warpgroups * 8 + columns / 8) * kGroupBytes;  // rounded up to whole instructions
  return std::max(exchange_bytes(shape.n) + stages(shape) * token_scale_bytes(shape) +
                      2 * tile_scale_bytes(shape) + kBarrierBytes,
                  read - stage_bytes(shape));
}

int FewRowsPlan::stages(const FewRowsShape& shape) const {
  const int read = (warpgroups * 8 + columns / 8) * kGroupBytes;
  const int fixed = exchange_bytes(shape.n) + 2 * tile_scale_bytes(shape) + kBarrierBytes;
  const int each = stage_bytes(shape) + token_scale_bytes(shape);
  const int bytes = wide_ring ? kMostBytes : kHalfBytes;
  const int room =
      std::min((bytes - fixed) / each, (bytes - (read - stage_bytes(shape))) / stage_bytes(shape));
  const int64_t useful = std::min<int64_t>(tiles(shape.n) * tile_stages(shape, *this), kMaxStages);
  return std::clamp(room, 2, std::max(static_cast<int>(useful), 2));
}

// The next launch's weights are read in gaps of this launch's memory traffic. If a few rings hold
// the whole matrix, the only gap is at the end, so the next launch begins late. With many rings,
// one launch's ring alone keeps too few bytes in flight; if all fits the ring there is no gap.
int FewRowsPlan::next_begins_at(const FewRowsShape& shape) const {
  const int64_t all = tiles(shape.n) * tile_stages(shape, *this);
  const int held = stages(shape);
  const bool splits_k = splits > 1;
  const bool at_once =
      all < 2 * held ? !(shape.scaled && splits_k && all > held) : all >= (splits_k ? 8 : 6) * held;
  return at_once ? 0 : static_cast<int>(std::max<int64_t>(all - (held + 1) / 2, held + 1));
}

// Between the ring's last bytes and the next loads, the first rows of x arrive and are multiplied:
// the L2 prefetch fills that gap. It is skipped where the next launch's ring fills the gap, or
// where nearly all weights fit the ring.
int FewRowsPlan::fetched(const FewRowsShape& shape) const {
  if (!shape.scaled) return 0;
  constexpr int kFetchedBytes = 32 * 1024;
  const int64_t all = tiles(shape.n) * tile_stages(shape, *this);
  const int held = stages(shape), weights = tile_groups(shape.n) * kGroupBytes;
  const bool late = !wide_ring && next_begins_at(shape) > 0;
  const bool pays = late ? 3 * all >= 7 * held : all >= 6 * held;
  return pays ? std::max((kFetchedBytes + weights / 2) / weights, 1) : 0;
}

namespace {

// Fitted to the measured times of all plans of V2-Lite's and V3's matrices, for e4m3 of the chosen
// plans: bytes / us of an SM and us.
struct Costs {
  double cache;          // all loads; weights load at kMemory at most
  double latency;        // from issue to arrival
  double stage, column;  // of the tensor cores
  double tile, join;     // join: combining a split tile, without the bytes sent
  double launch, alone;  // alone: with no other launch's CTA on the SM
};
constexpr double kMemory = 31.5e3, kExchange = 40e3;
constexpr Costs kCosts = {60e3, 1.05, 0.28, 0.0023, 0.07, 0, 1.95, 0.85};
constexpr Costs kScaledCosts = {50e3, 1.58, 0.29, 0.0017, 0.05, 0.11, 1.3, 0.66};

}  // namespace

double few_rows_cost(const FewRowsShape& shape, const FewRowsPlan& plan,
                     const ClusterCounts& counts) {
  const Costs& costs = shape.scaled ? kScaledCosts : kCosts;
  const double tiles = plan.tiles(shape.n);
  const double weights = plan.tile_groups(shape.n) * kGroupBytes;
  const double tokens = static_cast<double>(token_groups(shape)) * kGroupBytes;
  const double stage = std::max({weights / kMemory, (weights + tokens) / costs.cache,
                                 costs.stage + costs.column * plan.columns,
                                 costs.latency / (plan.stages(shape) - 1)});
  const double exchange =
      plan.splits == 1 ? 0 : costs.join + plan.warpgroups * 64 * plan.columns * 4 / kExchange;
  const double block =
      tiles * (static_cast<double>(tile_stages(shape, plan)) * stage + costs.tile + exchange) +
      costs.launch + (plan.wide_ring ? costs.alone : 0);
  return static_cast<double>(ceil_div(shape.batches * plan.clusters, counts.of(plan.splits))) *
         block;
}

FewRowsPlan plan_with(const FewRowsShape& shape, const ClusterCounts& counts, int warpgroups,
                      int splits, bool wide_ring) {
  const int64_t clusters = counts.of(splits) / shape.batches;
  FewRowsPlan plan = {.warpgroups = warpgroups,
                      .splits = splits,
                      .clusters = static_cast<int>(std::clamp<int64_t>(clusters, 1, shape.n / 8)),
                      .wide_ring = wide_ring};
  while (plan.columns < shape.rows) plan.columns *= 2;
  return plan;
}

FewRowsPlan plan_few_rows(const FewRowsShape& shape, const ClusterCounts& counts, int most_splits) {
  FewRowsPlan best;
  double least = 0;
  for (const int warpgroups : {1, 2}) {
    for (const int splits : {1, 2, 4, 8}) {
      if (splits > most_splits || (splits > 1 && shape.k < splits * shape.stage_columns()))
        continue;
      for (const bool wide_ring : {false, true}) {
        const FewRowsPlan plan = plan_with(shape, counts, warpgroups, splits, wide_ring);
        const double cost = few_rows_cost(shape, plan, counts);
        if (least == 0 || cost < least) {
          best = plan;
          least = cost;
        }
      }
    }
  }
  return best;
}

}  // namespace fathom::cuda
