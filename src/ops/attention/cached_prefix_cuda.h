// What multi-head attention needs for a prefix that is in the cache, on a GPU: the cached rows, out
// of their pages, and the joining of parts over different keys. gather_latent and merge_attention
// of ops/attention/attention.h for many sequences at once.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cache/cache_format.h"

namespace fathom::cuda {

// Sequence s of the list has the keys [first_keys[s], first_keys[s] + key_starts[s + 1] -
// key_starts[s]) of its cache copied to the rows from key_starts[s]. All pointers are device
// memory; pages, latent and k_rope aligned to 16 bytes.
struct GatherLatentArguments {
  const void* pages = nullptr;  // [num_pages, 64, row bytes], one layer's
  CacheFormat format = CacheFormat::kBF16;
  const int32_t* block_tables = nullptr;  // [sequences of the batch, max_pages]
  int32_t max_pages = 0;
  const int32_t* sequences = nullptr;   // [num_sequences], of the batch
  const int32_t* first_keys = nullptr;  // [num_sequences]
  const int32_t* key_starts = nullptr;  // [num_sequences + 1], rising from 0
  int32_t num_sequences = 0;
  int64_t keys = 0;        // rows of latent; those from key_starts[num_sequences] are left alone
  void* latent = nullptr;  // [keys, 512] bf16
  void* k_rope = nullptr;  // [keys, 64] bf16
};

void gather_latent(const GatherLatentArguments& arguments, cudaStream_t stream);

// Two results of attention over different keys become the one over all of them, by log-sum-exp. All
// pointers are device memory, aligned to 16 bytes. out may be a, lse a_lse.
struct MergeAttentionArguments {
  const float* a = nullptr;      // [rows, 128]; a row is a query and a head
  const float* a_lse = nullptr;  // [rows]
  const float* b = nullptr;
  const float* b_lse = nullptr;
  void* out = nullptr;   // [rows, 128] bf16, or f32 if out_f32
  bool out_f32 = false;  // for another merge
  float* lse = nullptr;  // [rows], or null
  int64_t rows = 0;
};

void merge_attention(const MergeAttentionArguments& arguments, cudaStream_t stream);

}  // namespace fathom::cuda
