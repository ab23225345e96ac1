// Gathers the rows of a cached prefix out of their pages for multi-head attention on a GPU:
// gather_latent of ops/attention/attention.h for many sequences at once.
#pragma once

#include <cstdint>

#include "cache/cache_format.h"
#include "device/cuda/gpu_stream.h"
#include "ops/scaled_linear/quantized_rows_cuda.h"

namespace fathom::cuda {

// Copies the keys [first_keys[s], first_keys[s] + key_starts[s + 1] - key_starts[s]) of each listed
// sequence s from its cache to the rows from key_starts[s] on. All pointers are device memory;
// pages, latent and k_rope aligned to 16 bytes.
struct GatherLatentArguments {
  const void* pages = nullptr;  // [num_pages, 64, row bytes], one layer's
  CacheFormat format = CacheFormat::kBF16;
  const int32_t* block_tables = nullptr;  // [sequences of the batch, max_pages]
  int32_t max_pages = 0;
  const int32_t* sequences = nullptr;   // [num_sequences]: indices into the batch
  const int32_t* first_keys = nullptr;  // [num_sequences]
  const int32_t* key_starts = nullptr;  // [num_sequences + 1], rising from 0
  int32_t num_sequences = 0;
  int64_t keys = 0;        // rows of latent; rows from key_starts[num_sequences] on are left alone
  void* latent = nullptr;  // [keys, 512] bf16; null: skipped
  void* k_rope = nullptr;  // [keys, 64] bf16
  QuantizedRows quantized = {};  // e4m3 latent: k = 512
};

void gather_latent(const GatherLatentArguments& arguments, GpuStream stream);

}  // namespace fathom::cuda
