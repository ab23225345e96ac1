// GEMMs of e4m3 with block-wise scales on a Hopper GPU:
//
//   out[m, n] = weight_row_scales[n]
//               * sum over blocks b of 128 of k: x_scales[b, m] * weight_scales[n / 128, b]
//                                                * (sum over k in b of x[m, k] * W[n, k])
//
// The tensor cores sum the products within a block, with some 14 bits for e4m3; sums over blocks
// are fp32 (DeepSeek-V3's technical report, arXiv 2412.19437, section 3.3.2).
//
// A per-tensor scale is repeated in every block; with per-row scales the block scales are 1. Few
// rows are bandwidth-bound (scaled_few_rows_cuda.h), many compute-bound (scaled_many_rows_cuda.h).
#pragma once

#include <cstdint>

#include "device/cuda/gpu_stream.h"
#include "tensor/dtype.h"

namespace fathom::cuda {

// All pointers are device memory, aligned to 16 bytes; strides count elements. Rows whose k is no
// multiple of 128 are padded with zeros to one, as quantize_rows() does.
struct ScaledLinearArguments {
  const void* x = nullptr;                   // [rows, k] e4m3
  int64_t x_row_stride = 0;                  // a multiple of 16
  const float* x_scales = nullptr;           // [k / 128, rows]
  int64_t x_scales_stride = 0;               // a multiple of 4
  const void* weight = nullptr;              // [n, k] e4m3, dense
  const float* weight_scales = nullptr;      // [n / 128 rounded up, k / 128], dense
  const float* weight_row_scales = nullptr;  // [n]; null: all 1
  void* out = nullptr;                       // [rows, n] bf16 or f32
  int64_t out_row_stride = 0;                // a multiple of 8
  DType out_type = DType::kBF16;
  int32_t rows = 0, n = 0, k = 0;  // n a multiple of 8, k of 128
  // Makes a row's bits independent of the number of rows: k is not split.
  bool batch_invariant = false;
};

// Enqueues one launch; none for no rows. Weights and their scales are read before the PDL wait: no
// launch of the same stream may be writing them. Deterministic: the same arguments give bitwise
// identical results. Arbitrary values in a row of x affect no other row.
void scaled_linear(const ScaledLinearArguments& arguments, GpuStream stream);

}  // namespace fathom::cuda
