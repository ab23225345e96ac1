// Absorbed attention over chosen rows of the paged latent cache (DeepSeek Sparse Attention), on a
// Hopper GPU: decode rows and rows of prompts.
//
// out[r, h] = sum_k softmax_k(scale * (q_latent[r, h] . latent[k] + q_rope[r, h] . rope[k]))
// latent[k] over the keys k in row r's list. The same operation as sparse_attention()
// (ops/attention/sparse_attention.h); latent 512 wide, rope 64, queries bf16, the cache in any
// format but f32.
//
// The kernels are described in sparse_latent_*_cuda.cu and docs/kernels/sparse_latent_attention.md.
#pragma once

#include <cstdint>

#include "cache/cache_format.h"
#include "device/cuda/gpu_stream.h"
#include "ops/attention/sparse_latent_cuda/sparse_latent_plan.h"

namespace fathom::cuda {

// All pointers are device memory, aligned to 16 bytes.
struct SparseLatentArguments {
  int64_t rows = 0;                // query rows: tokens of sequences that decode, or of prompts
  const void* q_latent = nullptr;  // [rows, heads, 512] bf16
  const void* q_rope = nullptr;    // [rows, heads, 64] bf16
  // One layer's part of the first page. Its 64 rows are contiguous; page p begins p * page_stride
  // bytes further, a multiple of 16.
  const void* pages = nullptr;
  int64_t page_stride = 0;
  const int32_t* block_tables = nullptr;  // [sequences, max_pages]
  int32_t max_pages = 0;
  const int32_t* sequences = nullptr;  // [rows]: each row's, an index into the block tables
  // [rows]: keys that each row sees. 0 or less: the row is unused, and its result is left alone.
  const int32_t* lengths = nullptr;
  // [rows, top_k]: the first min(top_k, lengths[r]) are positions, ascending, each below what the
  // block table covers. The rest is not read.
  const int32_t* keys = nullptr;
  int32_t top_k = 0;
  void* out = nullptr;  // [rows, heads, 512] bf16
  // Unless null, [rows, heads] f32: natural logarithm of the sum of exponentials.
  float* lse = nullptr;
  int32_t heads = 0;
  float softmax_scale = 0;
  // A multiple of 64, or at least top_k for one split. A row's list is cut into splits of this many
  // entries, which different CTAs compute.
  int32_t split_keys = 0;
  float* scratch = nullptr;  // sparse_latent_scratch_words(), not initialised; null with one split
  CacheFormat format = CacheFormat::kBF16;
};

// Enqueues one launch, and a second one that combines splits where split_keys < top_k. Lengths and
// lists are read on the device: a graph that holds the launches takes what is there when it is
// replayed. Everything may come from the preceding launches.
//
// Batch-invariant: a row's bits depend on its own list, keys and queries, and on split_keys.
void sparse_latent_attention(int num_multiprocessors, const SparseLatentArguments& arguments,
                             GpuStream stream);

}  // namespace fathom::cuda
