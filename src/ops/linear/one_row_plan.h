// The tiling of a GEMV over a GPU's SMs and a CTA's warps. Host code, a function of the shape
// alone.
//
// Rows of weights are taken in units: a few short rows, or one long row in pieces. CTAs share the
// units evenly; a CTA's warps take them in turn.
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
  int pieces = 1;     // per unit
  int slots = 1;      // per warp: pieces in flight
  int slot_bytes = 0;
  int batches_a_block = 1;  // most batches whose row of x a CTA needs
  // The next launch begins when a CTA has issued nearly all loads; otherwise at once.
  bool next_begins_late = false;
  int shared_bytes(const OneRowShape& shape) const;
};

// Whether GEMV beats linear_few_rows for one row: true except for a large matrix of short rows,
// whose units are small.
bool one_row_pays(const OneRowShape& shape, int multiprocessors);

OneRowPlan plan_one_row(const OneRowShape& shape, int multiprocessors);

}  // namespace fathom::cuda
