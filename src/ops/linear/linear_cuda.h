// GEMMs on a Hopper GPU: out[b][m, n] = sum over k of x[b][m, k] * W[b][n, k], bf16 products summed
// in fp32. The same operation as linear (ops/linear/linear.h); batches serve the absorption GEMMs,
// one batch a head.
//
// Up to kFewRows rows are bandwidth-bound (few_rows_cuda.h, and for most GEMVs one_row_cuda.h);
// above, the tensor cores are the limit (many_rows_cuda.h), and cuBLASLt serves the sizes at which
// it is faster, if given (library_plan.h).
#pragma once

#include <cstdint>

#include "device/cuda/gpu_stream.h"
#include "tensor/dtype.h"

namespace fathom::cuda {

class CublasLt;

// All pointers are device memory, aligned to 16 bytes; strides count elements and are multiples of
// 8; batch strides are ignored with one batch.
struct LinearArguments {
  const void* x = nullptr;  // [batches, rows, k] bf16, columns contiguous
  int64_t x_row_stride = 0, x_batch_stride = 0;
  const void* weight = nullptr;  // [batches, n, k] bf16, dense
  void* out = nullptr;           // [batches, rows, n] bf16 or f32, columns contiguous
  int64_t out_row_stride = 0, out_batch_stride = 0;
  DType out_type = DType::kBF16;
  int32_t rows = 0, n = 0, k = 0, batches = 1;  // n a multiple of 8, k of 64
  // Makes a row's bits independent of the number of rows: k is not split.
  bool batch_invariant = false;
  CublasLt* library = nullptr;  // serves the sizes at which it is faster; may be null
};

inline constexpr int kFewRows = 64;

// Enqueues one launch, with the library up to two; none for no rows. Weights are read before the
// PDL wait: no launch of the same stream may be writing them. Deterministic: the same arguments
// give bitwise identical results. Arbitrary values in a row of x affect no other row.
void linear(const LinearArguments& arguments, GpuStream stream);

}  // namespace fathom::cuda
