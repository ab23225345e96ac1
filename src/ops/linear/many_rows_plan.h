// How a product of many rows is cut into tiles on a GPU. Host code, a pure function of the sizes.
#pragma once

#include <cstdint>
#include <span>

namespace fathom::cuda {

// What a block computes at a time. With a split, so many blocks have a share of k of one tile each.
struct ManyRowsTile {
  int groups = 2;  // of 64 rows
  int columns = 256;
  int split = 1;

  int rows() const { return 64 * groups; }
  friend bool operator==(const ManyRowsTile&, const ManyRowsTile&) = default;
};

enum class ManyRowsType { kBF16, kScaledE4M3 };  // of the operands

// All that there are kernels for.
std::span<const ManyRowsTile> many_rows_tiles(ManyRowsType type = ManyRowsType::kBF16);

struct ManyRowsPlan {
  ManyRowsTile tile;
  int row_tiles = 0;     // of a batch
  int column_tiles = 0;  // of a batch
  // Tiles are taken in bands of so many tiles along one side, across all of the other: what runs at
  // a time shares operands in L2, and the larger operand is read from memory as rarely as can be.
  int band = 1;
  bool band_of_columns = false;
  int num_blocks = 0;
};

struct ManyRowsProblem {
  int64_t rows = 0, n = 0, k = 0, batches = 1;
  ManyRowsType type = ManyRowsType::kBF16;

  int64_t k_steps() const;  // stages of k
};

ManyRowsPlan plan_many_rows(const ManyRowsProblem& problem, int num_multiprocessors,
                            bool may_split = true);

// With the tile given. A split is for few tiles: no more than clusters of so many blocks find room,
// and k enough for all of them.
bool can_be_planned(const ManyRowsProblem& problem, ManyRowsTile tile, int num_multiprocessors);
ManyRowsPlan plan_many_rows(const ManyRowsProblem& problem, ManyRowsTile tile,
                            int num_multiprocessors);

}  // namespace fathom::cuda
