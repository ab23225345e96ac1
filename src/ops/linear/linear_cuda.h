// Matrix products on a Hopper GPU: out[b][m, n] = sum over k of x[b][m, k] * W[b][n, k], bf16
// products summed in fp32. The same operation as linear (ops/linear/linear.h); several batches are
// the absorption products, one for each head.
//
// Up to kFewRows rows reading the weights is all there is to it (few_rows_cuda.h, and for most
// products of one row one_row_cuda.h); above, the tensor cores are the limit (many_rows_cuda.h),
// and a library that is faster at some sizes can be lent (library_plan.h).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tensor/dtype.h"

namespace fathom::cuda {

class CublasLt;

// All pointers are device memory, aligned to 16 bytes; strides count elements and are multiples of
// 8; those of batches do not matter where there is one.
struct LinearArguments {
  const void* x = nullptr;  // [batches, rows, k] bf16, columns contiguous
  int64_t x_row_stride = 0, x_batch_stride = 0;
  const void* weight = nullptr;  // [batches, n, k] bf16, dense
  void* out = nullptr;           // [batches, rows, n] bf16 or f32, columns contiguous
  int64_t out_row_stride = 0, out_batch_stride = 0;
  DType out_type = DType::kBF16;
  int32_t rows = 0, n = 0, k = 0, batches = 1;  // n a multiple of 8, k of 64
  // A row's bits are the same whatever the number of rows: k is not split.
  bool batch_invariant = false;
  CublasLt* library = nullptr;  // takes what it is faster at; null: not there
};

inline constexpr int kFewRows = 64;

// Enqueues one launch, two at most by the library; nothing for no rows. Weights are read before
// earlier launches have ended: no launch of the same stream may be writing them. The same arguments
// give the same bits; rows of x that hold anything at all change no other row's.
void linear(const LinearArguments& arguments, cudaStream_t stream);

}  // namespace fathom::cuda
