// The two sides of the indexer on a Hopper GPU: write_index_keys() and make_index_queries() of
// ops/indexer/index_keys.h, with the Hadamard transform and e4m3.
//
// 128 values a row, of which the first 64 are rotated. Input rows are bf16 and aligned to 8 bytes;
// arithmetic is fp32 in the CPU's order, so that equal input gives the bytes of the CPU's portable
// code. Rows are independent of one another.
#pragma once

#include <cstdint>

#include "device/cuda/gpu_stream.h"
#include "device/cuda/planted_fault.h"
#include "ops/indexer/index_pages_cuda.h"

namespace fathom::cuda {

// All pointers are device memory. A row whose slot is negative is padding: nothing is written.
struct IndexKeysArguments {
  const void* k = nullptr;  // [rows, 128] bf16: wk's output
  int64_t k_stride = 0;     // elements from row to row
  const float* norm_weight = nullptr;
  const float* norm_bias = nullptr;  // both [128]
  float eps = 1e-6f;
  const float* cos_sin = nullptr;  // [max_positions, 32, 2]: tabulate(), copied
  bool interleaved = false;        // adjacent values are a pair; else (i, i + 32)
  const int32_t* positions = nullptr;
  const int64_t* slots = nullptr;  // [rows]: page * kPageSize + slot
  IndexPages pages;
  int64_t rows = 0;
  FATHOM_PLANTED_FAULT
};

// One launch.
void write_index_keys(const IndexKeysArguments& arguments, GpuStream stream);

// A row at a position below dense_keys sees no more keys than that: it is neither read nor written.
struct IndexQueriesArguments {
  const void* q = nullptr;              // [rows, heads, 128] bf16, dense: wq_b's output
  const float* head_weights = nullptr;  // [rows, heads] f32: weights_proj's output
  const float* cos_sin = nullptr;
  bool interleaved = false;
  const int32_t* positions = nullptr;
  void* values = nullptr;    // [rows, heads, 128] e4m3
  float* weights = nullptr;  // [rows, heads]: head_weights * (heads * 128)^-1/2 * e4m3's scale
  int64_t rows = 0;
  int32_t heads = 0;
  int32_t dense_keys = 0;
};

// One launch.
void make_index_queries(const IndexQueriesArguments& arguments, GpuStream stream);

}  // namespace fathom::cuda
