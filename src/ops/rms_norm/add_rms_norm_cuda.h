// rms_norm (ops/rms_norm/rms_norm.h) on a Hopper GPU, fused with the residual addition before it.
//
// out = weight * x / sqrt(mean(x^2) + eps) in fp32, rounded once to bf16. It is written in bf16, in
// e4m3 with scales 1x128, or in both. n is a multiple of 8, up to 16,384, in e4m3 of 128; all rows
// are aligned to 16 bytes.
#pragma once

#include <cstdint>

#include "device/cuda/gpu_stream.h"
#include "ops/scaled_linear/quantized_rows_cuda.h"
#include "tensor/dtype.h"

namespace fathom::cuda {

// All pointers are device memory.
struct AddRmsNormArguments {
  float* residual = nullptr;         // [.., n], dense
  const void* delta = nullptr;       // [.., n] added to it; null: none
  DType delta_type = DType::kBF16;   // or kF32
  int64_t delta_stride = 0;          // elements from row to row
  const int32_t* row_ids = nullptr;  // [rows]; null: row i is row i
  float* gathered = nullptr;         // [rows, n], dense; with row_ids
  const float* weight = nullptr;     // [n]
  float eps = 1e-6f;
  void* out = nullptr;           // [rows, n] bf16, dense; null: not written
  QuantizedRows quantized = {};  // k = n
  int64_t rows = 0, n = 0;
};

// residual += delta, and out = the norm of the sum. With row_ids, row i of the results is computed
// from rows row_ids[i] of residual and delta (nothing where it is negative), the residual is not
// changed, and the sum goes to row i of `gathered`: for the rows whose logits are needed, after
// which the other rows are not used. One launch.
void add_rms_norm(const AddRmsNormArguments& arguments, GpuStream stream);

struct RmsNormArguments {
  const void* x = nullptr;  // [rows, n] bf16
  int64_t x_stride = 0;     // elements from row to row
  const float* weight = nullptr;
  float eps = 1e-6f;
  void* out = nullptr;  // [rows, n] bf16; may be x; null: not written
  int64_t out_stride = 0;
  QuantizedRows quantized = {};  // k = n
  int64_t rows = 0, n = 0;
};

void rms_norm(const RmsNormArguments& arguments, GpuStream stream);

}  // namespace fathom::cuda
