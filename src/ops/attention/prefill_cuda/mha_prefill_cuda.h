// Multi-head attention of many new tokens over expanded keys and values, on a Hopper GPU: the
// second form of MLA (ops/attention/attention.h), for sequences of any lengths in one launch.
//
// out[r, h] = sum_k softmax_k(scale * (q_nope[r, h] . k_nope[k, h] + q_rope[r, h] . k_rope[k]))
// v[k, h] over the keys k that row r may see. Head dimensions 128 + 64 and 128, bf16.
//
// A sequence's keys may come in runs, one launch each, which overwrite one another in kv: partial
// results of rows are in `partial` and `lse` until the launch with the last key that they see.
//
// The kernel is described in mha_prefill_cuda.cu and docs/kernels/mha_prefill.md.
#pragma once

#include <cstdint>

#include "device/cuda/gpu_stream.h"
#include "ops/attention/prefill_cuda/mha_prefill_plan.h"
#include "ops/scaled_linear/quantized_rows_cuda.h"

namespace fathom::cuda {

// All pointers are device memory, aligned to 16 bytes. Rows and keys that belong to no tile may
// hold anything, including NaN; they are neither computed nor written.
struct MhaPrefillArguments {
  const void* q = nullptr;   // [rows, heads, 192] bf16: nope, then rope
  int64_t q_row_stride = 0;  // elements from row to row, a multiple of 8
  int64_t rows = 0;
  const void* kv = nullptr;      // [keys, heads, 256] bf16: k_nope, then v, as kv_b_proj gives them
  const void* k_rope = nullptr;  // [keys, 64] bf16
  int64_t keys = 0;
  void* out = nullptr;  // [rows, heads, 128] bf16; null: skipped
  // Input rows of the output projection: k is heads * 128, a head's columns are one scale block.
  QuantizedRows quantized = {};
  float* partial = nullptr;  // [rows, heads, 128]; null if no run is combined or continued
  float* lse = nullptr;      // [rows, heads]: natural log of the sum; may be null where partial is
  int32_t heads = 0;
  float softmax_scale = 0;  // > 0
  // Copies of the plan's: no launch writes them, so they are read before the PDL wait.
  const int32_t* first_tile = nullptr;
  const MhaPrefillTile* tiles = nullptr;
};

// Enqueues one launch with as many CTAs as the plan was made for. A row's bits depend on its own
// query, the keys that it sees and where these are cut into runs, not on the rest of the batch.
void mha_prefill(int num_multiprocessors, const MhaPrefillArguments& arguments, GpuStream stream);

}  // namespace fathom::cuda
