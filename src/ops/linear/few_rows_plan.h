// How a product of few rows is cut over the multiprocessors of a GPU. Host code, a function of the
// shape alone.
//
// Each batch's rows of weights are divided among `clusters` clusters, evenly to 8 rows; each
// cluster of `splits` blocks divides k. A block takes its rows in tiles of up to 64 * warpgroups
// rows, k in stages of 256 bytes: 128 columns of bf16, 256 of e4m3.
#pragma once

#include <cstdint>

namespace fathom::cuda {

struct FewRowsShape {
  int64_t rows = 0, n = 0, k = 0, batches = 1;
  bool scaled = false;  // e4m3, with scales by blocks of 128 of k

  int64_t stage_columns() const { return scaled ? 256 : 128; }
};

// How many clusters of so many blocks run at a time: a GPU's partitions are of unequal size, so
// that larger clusters leave some multiprocessors over. These are an H200's.
struct ClusterCounts {
  int of_1 = 132, of_2 = 66, of_4 = 30, of_8 = 15;

  int of(int blocks) const {
    return blocks == 1 ? of_1 : blocks == 2 ? of_2 : blocks == 4 ? of_4 : of_8;
  }
};

struct FewRowsPlan {
  static constexpr int kMaxStages = 32;

  int columns = 8;         // of the tensor cores' instruction, at least rows: 8, 16, 32 or 64
  int warpgroups = 1;      // that multiply: 1 or 2
  int splits = 1;          // of k: blocks of a cluster, 1, 2, 4 or 8
  int clusters = 1;        // of each batch
  bool wide_ring = false;  // more shared memory, so that no other launch fits beside it

  int tiles(int64_t n) const;           // of each block
  int tile_groups(int64_t n) const;     // of the largest tile, in 8 rows
  int exchange_bytes(int64_t n) const;  // for the parts that a cluster's blocks send each other
  int stage_bytes(const FewRowsShape& shape) const;
  int stages(const FewRowsShape& shape) const;  // of the ring
  // The next launch begins when so many of a block's stages have been asked for; 0: at once.
  int next_begins_at(const FewRowsShape& shape) const;
  // Stages beyond the ring that are asked into the L2 when earlier launches have ended.
  int fetched(const FewRowsShape& shape) const;
  // Of e4m3: the scales of a stage's tokens, and of the rows of W of a tile.
  int token_scale_bytes(const FewRowsShape& shape) const;
  int tile_scale_bytes(const FewRowsShape& shape) const;
  // Of shared memory behind the ring: the exchange, scales and barriers, and what the last stage's
  // product may read beyond it.
  int bytes_behind(const FewRowsShape& shape) const;
};

// With so many warpgroups and splits, and such a ring.
FewRowsPlan plan_with(const FewRowsShape& shape, const ClusterCounts& counts, int warpgroups,
                      int splits, bool wide_ring);

// The best of them; the best of those with no more splits than that.
FewRowsPlan plan_few_rows(const FewRowsShape& shape, const ClusterCounts& counts,
                          int most_splits = 8);

// An estimate of what a plan takes, in us: what plan_few_rows makes least.
double few_rows_cost(const FewRowsShape& shape, const FewRowsPlan& plan,
                     const ClusterCounts& counts);

}  // namespace fathom::cuda
