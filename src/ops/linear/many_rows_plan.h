// The tiling of a GEMM of many rows on a GPU. Host code, a pure function of the sizes.
#pragma once

#include <cstdint>
#include <span>

namespace fathom::cuda {

// The output tile of a CTA. With split-K, `split` CTAs take a k-slice of one tile each.
struct ManyRowsTile {
  int groups = 2;  // of 64 rows
  int columns = 256;
  int split = 1;

  int rows() const { return 64 * groups; }
  friend bool operator==(const ManyRowsTile&, const ManyRowsTile&) = default;
};

enum class ManyRowsType { kBF16, kScaledE4M3 };  // operand type

// All tiles that have kernels.
std::span<const ManyRowsTile> many_rows_tiles(ManyRowsType type = ManyRowsType::kBF16);

struct ManyRowsPlan {
  ManyRowsTile tile;
  int row_tiles = 0;     // per batch
  int column_tiles = 0;  // per batch
  // Tiles are taken in bands of so many tiles along one side, across all of the other: concurrent
  // tiles share operands in L2, and the larger operand is read from memory as rarely as possible.
  int band = 1;
  bool band_of_columns = false;
  int num_blocks = 0;
};

struct ManyRowsProblem {
  int64_t rows = 0, n = 0, k = 0, batches = 1;
  ManyRowsType type = ManyRowsType::kBF16;

  int64_t k_steps() const;  // stages along k
};

ManyRowsPlan plan_many_rows(const ManyRowsProblem& problem, int num_multiprocessors,
                            bool may_split = true);

// With the given tile. Split-K is for few tiles: no more than fit as clusters, and a k long enough
// for all CTAs.
bool can_be_planned(const ManyRowsProblem& problem, ManyRowsTile tile, int num_multiprocessors);
ManyRowsPlan plan_many_rows(const ManyRowsProblem& problem, ManyRowsTile tile,
                            int num_multiprocessors);

}  // namespace fathom::cuda
