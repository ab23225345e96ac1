// The tiling of the absorption GEMMs in e4m3 (scaled_absorb_cuda.h) over a GPU's SMs. Host code, a
// function of the shape alone.
//
// A CTA has a head, `blocks` of the four 128 x 128 blocks of its weights, and every row_parts-th
// tile of `tokens` rows. With many rows, weights are first upconverted to bf16 (wide).
#pragma once

#include <cstdint>

namespace fathom::cuda {

struct ScaledAbsorbShape {
  int64_t rows = 0, heads = 0;
  bool splits_n = false;  // each of the four blocks has its own result: [512, 128], not [128, 512]
  bool batch_invariant = false;  // one kernel for any number of rows
};

struct ScaledAbsorbPlan {
  static constexpr int kBlocks = 4;  // of a head's weights

  static constexpr int kWideTokens = 64;

  bool wide = false;
  int tokens = 8;  // per tile: 8, 16 or 32; 64 if wide
  int n_parts = 1;
  int row_parts = 1;

  int blocks() const { return kBlocks / n_parts; }
};

// The wide plan, whatever the rows; plan_scaled_absorb() returns it for many.
ScaledAbsorbPlan plan_wide_absorb(const ScaledAbsorbShape& shape, int num_multiprocessors);
ScaledAbsorbPlan plan_scaled_absorb(const ScaledAbsorbShape& shape, int num_multiprocessors);

}  // namespace fathom::cuda
