// Places of weights in a GPU's memory. Plain data.
#pragma once

#include <cstdint>

#include "tensor/dtype.h"
#include "tensor/four_bit.h"

namespace fathom::cuda {

// Destination of a matrix: [rows, cols] dense, zeros where the matrix ends before. In e4m3 rows and
// cols are rounded up to whole blocks of 128; rows need not be where nothing follows.
//
// kU8 is four-bit codes in tiles (ops/moe/plans/four_bit_tiles.h), `values` the first tile of an
// expert's matrix. Gate and up share one: each has every other eight rows.
struct WeightPlace {
  enum class TileRows { kAll, kGate, kUp };

  DType type = DType::kBF16;  // kBF16, kF32, kF8E4M3 or kU8
  void* values = nullptr;
  float* scales = nullptr;      // [rows / 128 rounded up, cols / 128], e4m3 only
  float* row_scales = nullptr;  // [rows], per-row scales of e4m3; null otherwise
  int64_t rows = 0, cols = 0;
  TileRows tile_rows = TileRows::kAll;  // kU8 only
};

// kv_b_proj [heads * (nope + v), latent] and each head's halves: W_UK transposed in uk [heads,
// latent, nope], W_UV in uv [heads, v, latent]. In e4m3 if kv_b is, nope and v are 128 and latent
// is a multiple of it, with the same scales; otherwise in bf16.
struct KvBSplit {
  WeightPlace kv_b, uk, uv;
  int32_t heads = 0, nope = 0, v = 0, latent = 0;
};

}  // namespace fathom::cuda
