// The tiling of the absorption GEMMs in e4m3 (scaled_absorb_cuda.h) over a GPU's SMs. Host code, a
// function of the shape alone.
//
// A CTA has a head, `blocks` of the four 128 x 128 blocks of its weights, and every row_parts-th
// tile of `tokens` rows.
#pragma once

#include <cstdint>

namespace fathom::cuda {

struct ScaledAbsorbShape {
  int64_t rows = 0, heads = 0;
  bool splits_n = false;  // each of the four blocks has its own result: [512, 128], not [128, 512]
};

struct ScaledAbsorbPlan {
  static constexpr int kBlocks = 4;  // of a head's weights

  int tokens = 8;  // per tile: 8, 16 or 32
  int n_parts = 1;
  int row_parts = 1;

  int blocks() const { return kBlocks / n_parts; }
};

ScaledAbsorbPlan plan_scaled_absorb(const ScaledAbsorbShape& shape, int num_multiprocessors);

}  // namespace fathom::cuda
