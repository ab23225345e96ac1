// One token through several layers of experts in a single launch on a Hopper GPU: norm, attention
// over the latent cache, norm, router, experts, and again, for the weights of DeepSeek-V3 as one of
// eight tensor-parallel GPUs has them (16 heads, an eighth of each expert's intermediate columns).
//
// For each layer
//
//   residual += delta;  x = norm(residual);  delta = W_o attention(x)
//   residual += delta;  x = norm(residual);  delta = experts(x)
//
// with the token's row written to the layer's cache. Weights are e4m3 with scales for blocks of
// 128 x 128, but the router's, which are bf16. What products read is f16 (times a power of two for
// each 128 columns where it is not a norm's result), not e4m3; what blocks hand to one another is
// rounded to bf16, as it is between launches.
//
// The kernel is described in decode_layers_cuda.cu and docs/kernels/decode_layers.md.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "cache/cache_format.h"
#include "ops/gate/gate_options.h"

namespace fathom::cuda {

struct ScaledMatrix {
  const void* values = nullptr;   // e4m3
  const float* scales = nullptr;  // of its blocks
};

// Device memory, as the model has it (model/weights_cuda.h says the shapes).
struct DecodeLayer {
  const float* input_norm = nullptr;           // [hidden]
  const float* q_a_norm = nullptr;             // [q_lora]
  const float* kv_a_norm = nullptr;            // [latent]
  const float* post_attention_norm = nullptr;  // [hidden]
  ScaledMatrix q_kv_a, q_b, uk, uv, o;
  const void* router = nullptr;        // [experts, hidden] bf16
  const float* router_bias = nullptr;  // [experts]
  ScaledMatrix gate_up, down;          // the routed experts'
  ScaledMatrix shared_gate_up, shared_down;
};

struct DecodeLayersShape {
  int64_t hidden = 0, heads = 0, q_lora = 0, latent = 0, nope = 0, rope = 0, v = 0;
  int64_t num_experts = 0, inter = 0, shared_inter = 0;
  GateOptions gate;
};

// Whether there is a kernel for this shape, on a GPU of so many multiprocessors.
bool decode_layers_takes(const DecodeLayersShape& shape, int num_multiprocessors);

// From this many tokens in the cache on, latent_decode's one reading of each latent row for all
// heads takes less time than every head's own.
inline constexpr int64_t kMostDecodeLayersTokens = 4096;

// Bytes of memory through which blocks hand one another results: zero before the first launch, one
// for all launches that never run at the same time.
int64_t decode_layers_exchange_bytes();

// All pointers are device memory, aligned to 16 bytes.
struct DecodeLayersArguments {
  const DecodeLayer* layers = nullptr;  // [num_layers]
  int32_t num_layers = 0;
  // [hidden]. Afterwards without the last layer's experts.
  float* residual = nullptr;
  const void* delta_in = nullptr;        // [hidden] bf16: added first
  void* delta_out = nullptr;             // [hidden] bf16: the last layer's experts
  float eps = 0, inner_eps = 0;          // inner: of the norms of q_a and kv_a
  const float* cos_sin = nullptr;        // [max_position, rope / 2, 2]
  const int32_t* position = nullptr;     // the token's: keys before it lie in the cache
  const int64_t* slot = nullptr;         // where its row goes: page * 64 + row of the page
  const int32_t* block_table = nullptr;  // pages of the sequence
  std::byte* pages = nullptr;            // the first layer's, [num_pages, 64, row bytes]
  int64_t layer_bytes = 0;               // from one layer's pages to the next one's
  CacheFormat format = CacheFormat::kBF16;
  float softmax_scale = 0;
  GateOptions gate;  // as the shape has it
  void* exchange = nullptr;
};

// Enqueues one launch. The same input gives the same bits.
void decode_layers(const DecodeLayersArguments& arguments, cudaStream_t stream);

}  // namespace fathom::cuda
