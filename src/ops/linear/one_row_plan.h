// How a product of one row is cut over the multiprocessors of a GPU and the warps of a block. Host
// code, a function of the shape alone.
//
// Rows of weights are taken in units: a few short rows, or one long row in pieces. Blocks share the
// units evenly, a block's warps take them in turn.
#pragma once

#include <cstdint>

namespace fathom::cuda {

struct OneRowShape {
  int64_t n = 0, k = 0, batches = 1;
};

struct OneRowPlan {
  static constexpr int kPieceColumns = 2048;  // of a row of weights, at most
  static constexpr int kMaxWarps = 8;

  int blocks = 1, warps = 1;
  int unit_rows = 1;  // 1, 2, 4 or 8
  int pieces = 1;     // of a unit
  int slots = 1;      // of each warp: pieces on their way
  int slot_bytes = 0;
  int batches_a_block = 1;  // whose rows of x a block wants, at most
  // The next launch begins when a block has asked for nearly all; otherwise at once.
  bool next_begins_late = false;
  int shared_bytes(const OneRowShape& shape) const;
};

// Whether one row is better taken so than by linear_few_rows: not a large matrix of short rows,
// whose units are small.
bool one_row_pays(const OneRowShape& shape, int multiprocessors);

OneRowPlan plan_one_row(const OneRowShape& shape, int multiprocessors);

}  // namespace fathom::cuda
