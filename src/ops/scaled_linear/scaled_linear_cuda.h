// Matrix products of e4m3 with scales by blocks on a Hopper GPU:
//
//   out[m, n] = sum over blocks b of 128 of k: x_scales[b, m] * weight_scales[n / 128, b]
//                                              * (sum over k in b of x[m, k] * W[n, k])
//
// A block's products are summed by the tensor cores, which keep some 14 bits of a sum of e4m3; the
// sums over blocks are fp32 (DeepSeek-V3's technical report, arXiv 2412.19437, section 3.3.2).
//
// Up to kFewScaledRows rows reading the weights is all there is to it (scaled_few_rows_cuda.h);
// above, the tensor cores are the limit (scaled_many_rows_cuda.h).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace fathom::cuda {

// All pointers are device memory, aligned to 16 bytes; strides count elements. Rows whose k is no
// multiple of 128 are stored with zeros up to one, as quantize_rows() does.
struct ScaledLinearArguments {
  const void* x = nullptr;               // [rows, k] e4m3
  int64_t x_row_stride = 0;              // a multiple of 16
  const float* x_scales = nullptr;       // [k / 128, rows]
  int64_t x_scales_stride = 0;           // a multiple of 4
  const void* weight = nullptr;          // [n, k] e4m3, dense
  const float* weight_scales = nullptr;  // [n / 128 rounded up, k / 128], dense
  void* out = nullptr;                   // [rows, n] bf16
  int64_t out_row_stride = 0;            // a multiple of 8
  int32_t rows = 0, n = 0, k = 0;        // n a multiple of 8, k of 128
};

}  // namespace fathom::cuda
