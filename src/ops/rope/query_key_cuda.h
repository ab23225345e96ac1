// The fused step after the projections of a layer's attention, on a Hopper GPU: split_rope_query's
// rotation and norm_rope_cache_write (ops/rope/rope.h) in one launch.
//
// Heads have `nope` unrotated values and 64 rotated ones; the latent is 512 wide, its rotary key
// 64. Queries are bf16, the cache has any format but f32; sums and rotations are fp32, rounded
// once. Rows are aligned to 16 bytes.
#pragma once

#include <cstdint>

#include "cache/cache_format.h"
#include "device/cuda/gpu_stream.h"
#include "device/cuda/planted_fault.h"

namespace fathom::cuda {

// All pointers are device memory. A row whose slot is negative is padding: it is neither read nor
// written.
struct QueryKeyArguments {
  void* q = nullptr;  // [rows, heads, nope + 64]: the rotated part of each head is rotated in place
  int64_t q_stride = 0;    // elements from row to row
  void* q_rope = nullptr;  // [rows, heads, 64] dense: second copy of the rotated parts; may be null
  const void* kv_a = nullptr;  // [rows, 512 + 64]: latent, rotary key; may be columns of q's rows
  int64_t kv_a_stride = 0;
  const float* norm_weight = nullptr;  // [512]
  float eps = 1e-6f;
  const float* cos_sin = nullptr;      // [max_positions, 32, 2]: tabulate(), copied
  const int32_t* positions = nullptr;  // [rows]
  const int64_t* slots = nullptr;      // [rows]: page * kPageSize + slot
  void* pages = nullptr;               // [num_pages, kPageSize, row bytes], one layer's
  CacheFormat format = CacheFormat::kBF16;
  int64_t rows = 0;
  int32_t heads = 0, nope = 0;
  FATHOM_PLANTED_FAULT
};

// One launch. Batch-invariant: the same input gives the same bits, whatever the other rows are.
void query_key(const QueryKeyArguments& arguments, GpuStream stream);

}  // namespace fathom::cuda
