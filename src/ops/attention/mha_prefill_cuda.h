// Multi-head attention of many new tokens over expanded keys and values, on a Hopper GPU: the
// second form of MLA (ops/attention/attention.h), for sequences of any lengths in one launch.
//
// out[r, h] = sum_k softmax_k(scale * (q_nope[r, h] . k_nope[k, h] + q_rope[r, h] . k_rope[k]))
// v[k, h] over the keys k that row r may see. Head dimensions 128 + 64 and 128, bf16.
//
// A sequence's keys may come in runs, a launch each, which overwrite one another in kv: what rows
// have so far is in `partial` and `lse`, until the launch with the last key that they see.
//
// The kernel is described in mha_prefill_cuda.cu and docs/kernels/mha_prefill.md.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ops/attention/mha_prefill_plan.h"
#include "ops/scaled_linear/quantized_rows_cuda.h"

namespace fathom::cuda {

// All pointers are device memory, aligned to 16 bytes. Rows and keys that belong to no tile may
// hold anything, NaN too; they are neither computed nor written.
struct MhaPrefillArguments {
  const void* q = nullptr;   // [rows, heads, 192] bf16: nope, then rope (rotated)
  int64_t q_row_stride = 0;  // elements from row to row, a multiple of 8
  int64_t rows = 0;
  const void* kv = nullptr;      // [keys, heads, 256] bf16: k_nope, then v, as kv_b_proj gives them
  const void* k_rope = nullptr;  // [keys, 64] bf16
  int64_t keys = 0;
  void* out = nullptr;  // [rows, heads, 128] bf16; null: not wanted
  // Of the output projection's rows: k is heads * 128, a head's columns one block.
  QuantizedRows quantized = {};
  float* partial = nullptr;  // [rows, heads, 128]; null if no part is joined or goes on
  float* lse = nullptr;      // [rows, heads]: natural log of the sum; may be null where partial is
  int32_t heads = 0;
  float softmax_scale = 0;  // > 0
  // The plan's, copied: no launch writes them, so they are read before earlier launches have ended.
  const int32_t* first_tile = nullptr;
  const MhaPrefillTile* tiles = nullptr;
};

// Enqueues one launch of as many blocks as the plan was made for. A row's bits depend on its own
// query, the keys that it sees and where these are cut into parts, not on the rest of the batch.
void mha_prefill(int num_multiprocessors, const MhaPrefillArguments& arguments,
                 cudaStream_t stream);

}  // namespace fathom::cuda
