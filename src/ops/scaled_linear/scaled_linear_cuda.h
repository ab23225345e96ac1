// Matrix products of e4m3 with scales by blocks on a Hopper GPU:
//
//   out[m, n] = weight_row_scales[n]
//               * sum over blocks b of 128 of k: x_scales[b, m] * weight_scales[n / 128, b]
//                                                * (sum over k in b of x[m, k] * W[n, k])
//
// A block's products are summed by the tensor cores, which keep some 14 bits of a sum of e4m3; the
// sums over blocks are fp32 (DeepSeek-V3's technical report, arXiv 2412.19437, section 3.3.2).
//
// Weights with one scale have it in every block; those with a scale for each row have 1 there.
// Few rows are bound by reading the weights (scaled_few_rows_cuda.h), many by the tensor cores
// (scaled_many_rows_cuda.h).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tensor/dtype.h"

namespace fathom::cuda {

// All pointers are device memory, aligned to 16 bytes; strides count elements. Rows whose k is no
// multiple of 128 are stored with zeros up to one, as quantize_rows() does.
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
  // A row's bits are the same whatever the number of rows: k is not split.
  bool batch_invariant = false;
};

// Enqueues one launch; nothing for no rows. Weights and their scales are read before earlier
// launches have ended: no launch of the same stream may be writing them. The same arguments give
// the same bits; rows of x that hold anything at all change no other row's.
void scaled_linear(const ScaledLinearArguments& arguments, cudaStream_t stream);

}  // namespace fathom::cuda
