// quantize_rows.h on the GPU: rows of bf16 to e4m3 with scales 1x128, in the layout that e4m3 GEMMs
// read (scaled_linear_cuda.h).
#pragma once

#include <cstdint>

#include "device/cuda/gpu_stream.h"
#include "ops/scaled_linear/quantize_rows.h"

namespace fathom::cuda {

// All pointers are device memory, aligned to 16 bytes.
struct QuantizeRowsArguments {
  const void* x = nullptr;   // [rows, k] bf16
  int64_t x_row_stride = 0;  // a multiple of 8
  // [rows, k rounded up to a multiple of 128] e4m3; the columns from k on become 0.
  void* values = nullptr;
  int64_t values_row_stride = 0;  // a multiple of 16
  // [blocks of 128 columns, rows]: a tile of rows has its scales side by side. The padding between
  // rows and the stride is not written.
  float* scales = nullptr;
  int64_t scales_block_stride = 0;  // at least rows, a multiple of 4
  int32_t rows = 0, k = 0;          // k a multiple of 8
  ScaleForm form = ScaleForm::kF32;
  float fixed_scale = 0;  // scale of all blocks, saturating; 0: each block's own
};

// Enqueues one launch; nothing for no rows.
void quantize_rows(const QuantizeRowsArguments& arguments, GpuStream stream);

}  // namespace fathom::cuda
