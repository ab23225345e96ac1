// The absorption GEMMs on a Hopper GPU with weights in e4m3: for each head h,
//
//   out[m, h] = x[m, h] W[h]^T
//
// W_UK takes queries into the latent space ([n, k] is [512, 128]), W_UV results out of it ([128,
// 512]). x is bf16 and is multiplied as such or, with few rows, as two e4m3 terms with a scale for
// each 128 columns, which together lack some 2^-9 of an element; weights are multiplied unscaled,
// and sums over 128 of k are scaled in fp32. So the error is about that of rounding the results to
// bf16.
#pragma once

#include <cstdint>

#include "device/cuda/gpu_stream.h"
#include "ops/scaled_linear/quantized_rows_cuda.h"
#include "ops/scaled_linear/scaled_absorb_plan.h"

namespace fathom::cuda {

// The shapes that have kernels: other models' halves of kv_b stay bf16.
inline constexpr int kAbsorbedHead = 128, kAbsorbedLatent = 512;

// All pointers are device memory, aligned to 16 bytes; strides count elements and are multiples of
// 8.
struct ScaledAbsorbArguments {
  const void* x = nullptr;  // [rows, heads, k] bf16
  int64_t x_row_stride = 0, x_head_stride = 0;
  const void* weight = nullptr;          // [heads, n, k] e4m3, dense
  const float* weight_scales = nullptr;  // [heads, n / 128, k / 128], dense
  void* out = nullptr;                   // [rows, heads, n] bf16; null: not written
  int64_t out_row_stride = 0, out_head_stride = 0;
  QuantizedRows quantized = {};  // n = 128 only: k is heads * 128, a head's columns one block
  int32_t rows = 0, heads = 0, n = 0, k = 0;  // [n, k] is [512, 128] or [128, 512]
};

// Enqueues one launch; none for no rows. Weights and their scales are read before the PDL wait: no
// launch of the same stream may be writing them. A row's bits depend neither on the other rows nor
// on their number.
void scaled_absorb(const ScaledAbsorbArguments& arguments, GpuStream stream);

// The same with a given plan, for measuring.
void scaled_absorb(const ScaledAbsorbPlan& plan, const ScaledAbsorbArguments& arguments,
                   GpuStream stream);

}  // namespace fathom::cuda
