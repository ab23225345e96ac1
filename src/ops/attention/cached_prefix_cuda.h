// What multi-head attention needs for a prefix that is in the cache, on a GPU: the cached rows, out
// of their pages. gather_latent of ops/attention/attention.h for many sequences at once.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cache/cache_format.h"
#include "ops/scaled_linear/quantized_rows_cuda.h"

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
  void* latent = nullptr;  // [keys, 512] bf16; null: not wanted
  void* k_rope = nullptr;  // [keys, 64] bf16
  QuantizedRows quantized = {};  // of the latent: k = 512
};

void gather_latent(const GatherLatentArguments& arguments, cudaStream_t stream);

}  // namespace fathom::cuda
