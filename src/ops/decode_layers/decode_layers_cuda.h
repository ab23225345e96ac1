// One token, or a few, through several MoE layers in a single launch on a Hopper GPU: norm,
// attention over the latent cache, norm, router, experts, and again, for the weights of one TP8
// rank of DeepSeek-V3 (16 heads, a TP8 slice of each expert's intermediate columns; up to four
// tokens) and for DeepSeek-V2-Lite (up to two).
//
// For each layer
//
//   residual += delta;  x = norm(residual);  delta = W_o attention(x)
//   residual += delta;  x = norm(residual);  delta = experts(x)
//
// and each token's row is written to the layer's cache. Weights are e4m3 with block-wise 128 x 128
// scales, or bf16 (V2-Lite), the router's always bf16. GEMV inputs beside e4m3 are f16 (scaled by a
// power of two for each 128 columns where they are not a norm's result), not e4m3; beside bf16 they
// are bf16. Values passed between CTAs are rounded to bf16, as they are between launches, and so is
// the residual before a norm; what is added up is fp32.
//
// Under tensor parallelism the rows of W_o and of the experts are parts of sums over ranks, which
// are made within the launch: the launches of all ranks meet (V3's shape).
//
// The kernel is described in decode_layers_launch_cuda.cuh and docs/kernels/decode_layers.md.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cache/cache_format.h"
#include "device/cuda/gpu_stream.h"
#include "device/cuda/peer_group.h"
#include "device/cuda/planted_fault.h"
#include "ops/decode_layers/decode_layers_support.h"
#include "ops/gate/gate_options.h"

namespace fathom::cuda {

struct ScaledMatrix {
  const void* values = nullptr;   // e4m3 or bf16
  const float* scales = nullptr;  // block-wise 128 x 128; null with bf16
};

// Device memory as the model lays it out; model/weights_cuda.h documents the shapes.
struct DecodeLayer {
  const float* input_norm = nullptr;           // [hidden]
  const float* q_a_norm = nullptr;             // [q_lora]; null without query compression
  const float* kv_a_norm = nullptr;            // [latent]
  const float* post_attention_norm = nullptr;  // [hidden]
  ScaledMatrix q_kv_a, q_b, uk, uv, o;         // q_b: with query compression
  const void* router = nullptr;                // [experts, hidden] bf16
  const float* router_bias = nullptr;          // [experts]; null without
  ScaledMatrix gate_up, down;                  // of the routed experts
  ScaledMatrix shared_gate_up, shared_down;
};

// Bytes of the memory through which CTAs exchange results. Zero it before the first launch;
// launches that never overlap can share it.
int64_t decode_layers_exchange_bytes(DecodeLayersKind kind);

// All pointers are device memory, aligned to 16 bytes.
struct DecodeLayersArguments {
  DecodeLayersKind kind = DecodeLayersKind::kNone;  // which shape; not kNone
  const DecodeLayer* layers = nullptr;              // [num_layers]
  int32_t num_layers = 0;
  // Tokens, at most most_decode_layers_rows(kind), of any sequences; consecutive ones of a sequence
  // stand together.
  int32_t rows = 1;
  // [rows, hidden]. On return it lacks the last layer's experts, which are in delta_out.
  float* residual = nullptr;
  const void* delta_in = nullptr;  // [rows, hidden] bf16: added first
  void* delta_out = nullptr;       // [rows, hidden] bf16: the last layer's experts
  float eps = 0, inner_eps = 0;    // inner_eps: norms of q_a and kv_a
  const float* cos_sin = nullptr;  // [max_position, rope / 2, 2]
  // [rows]: each token's, below the shape's kMostTokens. Keys before it lie in the cache, but for
  // those of the same sequence's tokens before it.
  const int32_t* positions = nullptr;
  // [rows]: destination of each token's cache row, page * 64 + row of the page.
  const int64_t* slots = nullptr;
  const int32_t* block_tables = nullptr;  // pages of the sequences
  // [rows]: place in block_tables of the first page of a token's sequence, equal for tokens of one.
  // Null: 0, with one row.
  const int32_t* table_starts = nullptr;
  std::byte* pages = nullptr;  // the first layer's, [num_pages, 64, row bytes]
  int64_t layer_bytes = 0;     // from one layer's pages to the next one's
  CacheFormat format = CacheFormat::kBF16;
  float softmax_scale = 0;
  GateOptions gate;  // as in the shape
  void* exchange = nullptr;
  // With more than one rank every delta but delta_in is a rank's part of a sum, rounded to bf16.
  // The sum adds parts to the residual in the order of ranks in fp32. delta_in has to be null,
  // delta_out stays a part. Takes 2 num_layers - 1 exchanges of the group's first `rows` rows, as
  // many calls of peer_sum() would; ranks have [rows, hidden] inboxes. kV3Tp8 only; all ranks'
  // launches have to be resident at once.
  PeerRank peers = {};
  FATHOM_PLANTED_FAULT
};

// Enqueues one launch. Results are deterministic.
void decode_layers(const DecodeLayersArguments& arguments, GpuStream stream);

}  // namespace fathom::cuda
