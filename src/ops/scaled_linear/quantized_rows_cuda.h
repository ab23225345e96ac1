// Destination of activation rows in e4m3, in the layout that e4m3 GEMMs read
// (scaled_linear_cuda.h), for GPU operations that quantize their own result, so that no
// quantize_rows() follows.
#pragma once

#include <cstdint>

#include "ops/scaled_linear/quantize_rows.h"

namespace fathom::cuda {

// Pointers are device memory, aligned to 16 bytes. The values are bitwise those that
// quantize_rows() makes of the operation's result in bf16; k is a multiple of 128.
struct QuantizedRows {
  void* values = nullptr;           // [rows, k] e4m3; null: do not quantize
  int64_t values_row_stride = 0;    // a multiple of 16
  float* scales = nullptr;          // [k / 128, rows]
  int64_t scales_block_stride = 0;  // at least rows, a multiple of 4
  ScaleForm form = ScaleForm::kF32;
  float fixed_scale = 0;  // scale of all blocks, saturating; 0: each block's own
};

}  // namespace fathom::cuda
