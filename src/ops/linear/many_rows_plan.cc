#include "ops/linear/many_rows_plan.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <limits>

#include "base/math.h"

namespace fathom::cuda {
namespace {

// The tile shapes that have kernels, and their times on an H200 at full power: us per stage of k
// (128 bytes a row), and us per tile for the parts of prologue and epilogue that are not hidden.
struct TileCost {
  ManyRowsTile tile;
  double step_us, tile_us;
};
constexpr TileCost kTileCosts[] = {{{.groups = 2, .columns = 256}, 0.605, 3.3},
                                   {{.groups = 3, .columns = 192}, 0.70, 4.0},
                                   {{.groups = 2, .columns = 192}, 0.47, 2.9},
                                   {{.groups = 2, .columns = 128}, 0.43, 2.4},
                                   {{.groups = 1, .columns = 64}, 0.24, 1.8},
                                   {{.groups = 2, .columns = 256, .split = 2}, 0.61, 6.5},
                                   {{.groups = 2, .columns = 128, .split = 2}, 0.505, 4.2},
                                   {{.groups = 1, .columns = 64, .split = 2}, 0.30, 2.4}};
constexpr TileCost kScaledTileCosts[] = {{{.groups = 4, .columns = 128}, 0.77, 2.3},
                                         {{.groups = 4, .columns = 112}, 0.76, 2.0},
                                         {{.groups = 2, .columns = 192}, 0.56, 1.6},
                                         {{.groups = 2, .columns = 144}, 0.51, 1.2},
                                         {{.groups = 2, .columns = 128}, 0.44, 0.9},
                                         {{.groups = 2, .columns = 64}, 0.26, 0.4},
                                         {{.groups = 1, .columns = 192}, 0.43, 2.2},
                                         {{.groups = 1, .columns = 144}, 0.42, 2.1},
                                         {{.groups = 1, .columns = 128}, 0.28, 1.3},
                                         {{.groups = 1, .columns = 64}, 0.17, 1.9},
                                         {{.groups = 2, .columns = 128, .split = 2}, 0.34, 5.9},
                                         {{.groups = 1, .columns = 128, .split = 2}, 0.20, 5.1},
                                         {{.groups = 1, .columns = 64, .split = 2}, 0.12, 3.5},
                                         {{.groups = 1, .columns = 128, .split = 4}, 0.21, 5.0},
                                         {{.groups = 1, .columns = 64, .split = 4}, 0.12, 4.8}};

template <size_t kCount>
constexpr auto tiles_of(const TileCost (&costs)[kCount]) {
  std::array<ManyRowsTile, kCount> tiles;
  std::ranges::transform(costs, tiles.begin(), &TileCost::tile);
  return tiles;
}
constexpr auto kTiles = tiles_of(kTileCosts);
constexpr auto kScaledTiles = tiles_of(kScaledTileCosts);

std::span<const TileCost> costs_of(ManyRowsType type) {
  return type == ManyRowsType::kBF16 ? std::span<const TileCost>(kTileCosts) : kScaledTileCosts;
}

// Time ratio that a smaller bf16 tile must beat: long GEMMs are power-limited, and a small tile
// costs more power.
constexpr double kWorthIt = 0.97;

// Rows or columns of operands that concurrent tiles share.
constexpr int64_t kBandSize = 1024, kScaledBandSize = 2048;
// Bytes of an operand that stay cached: half of a Hopper GPU's L2.
constexpr int64_t kStaysInL2 = 24 << 20;

int64_t num_tiles(const ManyRowsPlan& plan, int64_t batches) {
  return int64_t{plan.row_tiles} * plan.column_tiles * batches;
}

double cost(const ManyRowsProblem& problem, const TileCost& costs, int num_multiprocessors) {
  const ManyRowsTile tile = costs.tile;
  const ManyRowsPlan plan = plan_many_rows(problem, tile, num_multiprocessors);
  const auto waves = static_cast<double>(
      ceil_div(num_tiles(plan, problem.batches), num_multiprocessors / tile.split));
  const auto steps = static_cast<double>(ceil_div(problem.k_steps(), tile.split));
  // Lower bound by bandwidth: W is read in any case, each CTA its own share.
  constexpr double kReadBytesPerUs = 4.2e6;
  const double blocks = static_cast<double>(plan.num_blocks);
  const double read =
      problem.type == ManyRowsType::kBF16
          ? 0
          : tile.columns * 128 * blocks / static_cast<double>(plan.row_tiles) / kReadBytesPerUs;
  return waves * (steps * std::max(costs.step_us, read) + costs.tile_us);
}

}  // namespace

std::span<const ManyRowsTile> many_rows_tiles(ManyRowsType type) {
  return type == ManyRowsType::kBF16 ? std::span<const ManyRowsTile>(kTiles) : kScaledTiles;
}

int64_t ManyRowsProblem::k_steps() const { return k / (type == ManyRowsType::kBF16 ? 64 : 128); }

bool can_be_planned(const ManyRowsProblem& problem, ManyRowsTile tile, int num_multiprocessors) {
  if (tile.split == 1) return true;
  const int64_t tiles = ceil_div(problem.rows, tile.rows()) * ceil_div(problem.n, tile.columns);
  // A GPU's partitions are of unequal size: clusters of four leave some SMs idle.
  const int64_t clusters = tile.split == 2 ? num_multiprocessors / 2 : num_multiprocessors * 5 / 22;
  return tiles * problem.batches <= clusters && problem.k_steps() >= tile.split;
}

ManyRowsPlan plan_many_rows(const ManyRowsProblem& problem, ManyRowsTile tile,
                            int num_multiprocessors) {
  ManyRowsPlan plan;
  plan.tile = tile;
  const int64_t rows = tile.rows();
  plan.row_tiles = static_cast<int>(ceil_div(problem.rows, rows));
  plan.column_tiles = static_cast<int>(ceil_div(problem.n, tile.columns));
  // Bands of rows read W once a band; bands of columns read x once a band.
  const int64_t band_size = problem.type == ManyRowsType::kBF16 ? kBandSize : kScaledBandSize;
  const int64_t row_band = std::max<int64_t>(1, band_size / rows),
                column_band = std::max<int64_t>(1, band_size / tile.columns);
  const auto reads = [&](int64_t operand_rows, int64_t bands) {
    const int64_t bytes = operand_rows * problem.k_steps() * 128;
    return bytes <= kStaysInL2 ? bytes : bytes * bands;
  };
  plan.band_of_columns =
      reads(problem.rows, ceil_div(plan.column_tiles, column_band)) + reads(problem.n, 1) <
      reads(problem.n, ceil_div(plan.row_tiles, row_band)) + reads(problem.rows, 1);
  plan.band = static_cast<int>(plan.band_of_columns ? column_band : row_band);
  const int64_t clusters =
      std::min<int64_t>(num_tiles(plan, problem.batches), num_multiprocessors / tile.split);
  plan.num_blocks = static_cast<int>(clusters * tile.split);
  return plan;
}

ManyRowsPlan plan_many_rows(const ManyRowsProblem& problem, int num_multiprocessors,
                            bool may_split) {
  ManyRowsTile best;
  double least = std::numeric_limits<double>::infinity();
  for (const TileCost& costs : costs_of(problem.type)) {
    if (costs.tile.split > 1 && !may_split) continue;
    if (!can_be_planned(problem, costs.tile, num_multiprocessors)) continue;
    if (problem.rows <= 64 && costs.tile.groups > 1) continue;  // half of the tile would be padding
    const double us = cost(problem, costs, num_multiprocessors);
    if (us < (problem.type == ManyRowsType::kBF16 ? kWorthIt : 1) * least) {
      least = us;
      best = costs.tile;
    }
  }
  return plan_many_rows(problem, best, num_multiprocessors);
}

}  // namespace fathom::cuda
