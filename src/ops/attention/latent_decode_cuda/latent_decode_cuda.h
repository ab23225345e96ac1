// Absorbed attention of a few new tokens a sequence over the paged latent cache, on a Hopper GPU.
//
// out[r, h] = sum_k softmax_k(scale * (q_latent[r, h] . latent[k] + q_rope[r, h] . rope[k]))
// latent[k] over the keys k that token r may see: its sequence's up to itself. The same operation
// as absorbed_attention (ops/attention/attention.h); latent 512 wide, rope 64, queries bf16,
// the cache in any format but f32.
//
// The kernels are described in latent_decode_cuda.cu, latent_decode_8_bit_cuda.cu and
// docs/kernels/latent_decode*.md.
#pragma once

#include <cstdint>

#include "cache/cache_format.h"
#include "device/cuda/gpu_stream.h"
#include "ops/attention/latent_decode_cuda/latent_decode_plan.h"

namespace fathom::cuda {

// All pointers are device memory, aligned to 16 bytes.
struct LatentDecodeArguments {
  int64_t rows = 0;                // tokens
  const void* q_latent = nullptr;  // [rows, heads, 512] bf16
  const void* q_rope = nullptr;    // [rows, heads, 64] bf16
  const void* pages = nullptr;     // [num_pages, 64, row bytes], one layer's
  int64_t num_pages = 0;
  const int32_t* block_tables = nullptr;  // [sequences, max_pages], as the plan's batch has them
  void* out = nullptr;                    // [rows, heads, 512] bf16
  int32_t heads = 0;
  float softmax_scale = 0;
  const LatentDecodePart* parts = nullptr;  // the plan's, copied
  const int32_t* first_part = nullptr;      // the plan's, copied
  float* scratch = nullptr;                 // latent_decode_scratch(), prepared once
  CacheFormat format = CacheFormat::kBF16;  // as the plan was made for
};

// Fills scratch memory with the "not there yet" value. Each launch leaves all of it as it was: once
// is enough for any number of launches of any plans, one at a time.
void prepare_latent_decode_scratch(float* scratch, int num_multiprocessors, GpuStream stream);

// Enqueues one launch with as many CTAs as the plan was made for. Rows of sequences that are not in
// the plan are left alone. The same plan and input give bitwise identical results. A graph that
// holds the launch takes whatever plan is in device memory when it is replayed, if it has these
// tile rows.
//
// Queries and the pages of new tokens may come from the preceding launches. The plan, the block
// tables and all other pages are read before the PDL wait: whatever wrote them must have ended
// before the first launch of this PDL chain began, as a copy to the device or an earlier step has.
void latent_decode(int tile_rows, int num_multiprocessors, const LatentDecodeArguments& arguments,
                   GpuStream stream);

}  // namespace fathom::cuda
