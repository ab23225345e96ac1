// How the absorption products of e4m3 (scaled_absorb_cuda.h) are cut over the multiprocessors of a
// GPU. Host code, a function of the shape alone.
//
// A thread block has a head, `blocks` of the four 128 x 128 blocks of its weights, and every
// row_parts-th tile of `tokens` rows. Many rows are worth weights widened to bf16 first (wide).
#pragma once

#include <cstdint>

namespace fathom::cuda {

struct ScaledAbsorbShape {
  int64_t rows = 0, heads = 0;
  bool splits_n = false;  // the four blocks have results of their own: [512, 128], not [128, 512]
  bool batch_invariant = false;  // one way for any number of rows
};

struct ScaledAbsorbPlan {
  static constexpr int kBlocks = 4;  // of a head's weights

  static constexpr int kWideTokens = 64;

  bool wide = false;
  int tokens = 8;  // of a tile: 8, 16 or 32; 64 if wide
  int n_parts = 1;
  int row_parts = 1;

  int blocks() const { return kBlocks / n_parts; }
};

// The wide way, whatever the rows: what plan_scaled_absorb() gives for many.
ScaledAbsorbPlan plan_wide_absorb(const ScaledAbsorbShape& shape, int num_multiprocessors);
ScaledAbsorbPlan plan_scaled_absorb(const ScaledAbsorbShape& shape, int num_multiprocessors);

}  // namespace fathom::cuda
