// A rank's weights as its kernels read them: pointers into one GPU's memory. Plain data; where the
// weights lie decides upload_plan.h, weights_cuda.h owns the memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tensor/dtype.h"
#include "tensor/four_bit.h"

namespace fathom::cuda {

// [n, k] or a batch of them, dense, in device memory: bf16, or e4m3 with scales,
//
//   W[r, c] = values[r, c] * scales[r / 128, c / 128] * row_scales[r]
//
// e4m3 requires k to be a multiple of 128, and the n of each matrix of a batch and of each stacked
// matrix but the last. Routed experts may also be kU8: four-bit codes and scales in tiles
// (ops/moe/plans/four_bit_tiles.h).
struct WeightMatrix {
  DType type = DType::kBF16;  // or kF8E4M3, or kU8
  void* values = nullptr;
  float* scales = nullptr;      // [n / 128 rounded up, k / 128]; null with bf16
  float* row_scales = nullptr;  // [n]; null: all 1. If not, the scales are 1
  // A static checkpoint's scale of this GEMM's x (the largest of the stacked matrices'); 0: x is
  // quantized dynamically.
  float input_scale = 0;
};

inline constexpr int64_t kBf16WidthUnit = 64;

// All pointers are device memory; matrices are dense, columns contiguous. H heads of the rank; null
// where the rank has no such part.
struct MlpWeights {
  // The rank's intermediate width, zero-padded to a multiple of kBf16WidthUnit, in e4m3 of 128.
  int64_t width = 0;
  FourBitCode code = FourBitCode::kInteger;  // of kU8
  // Both of one type, and the routed experts' the same as the shared ones' unless kU8. Without
  // row_scales: per-row scales have become block-wise.
  WeightMatrix gate_up;  // [2 * width, hidden]: gate's rows, then up's
  WeightMatrix down;     // [hidden, width]
};

// Indexer of a layer that selects its keys (DeepSeek-V3.2); the index keys' matrix is part of
// q_kv_a.
struct IndexerMatrices {
  WeightMatrix q;           // [index heads * index dim, q_lora]
  WeightMatrix weights;     // [index heads, hidden], bf16
  float* k_norm = nullptr;  // [index dim]
  float* k_norm_bias = nullptr;
};

struct LayerWeights {
  float* input_norm = nullptr;           // [hidden]
  float* post_attention_norm = nullptr;  // [hidden]

  // q_proj [H * (nope + rope), hidden] or, with query compression, q_a [q_lora, hidden]; with an
  // indexer wk [index dim, hidden]; then kv_a [latent + rope, hidden].
  WeightMatrix q_kv_a;
  float* q_a_norm = nullptr;   // [q_lora]
  WeightMatrix q_b;            // [H * (nope + rope), q_lora]
  float* kv_a_norm = nullptr;  // [latent]
  WeightMatrix kv_b;           // [H * (nope + v), latent]
  WeightMatrix uk;             // [H, latent, nope]: W_UK transposed
  WeightMatrix uv;             // [H, v, latent]
  WeightMatrix o;              // [hidden, H * v]
  IndexerMatrices indexer;     // null pointers without sparse attention

  MlpWeights dense;           // of a dense layer
  std::byte* gate = nullptr;  // [experts, hidden] of gate_type: the router
  DType gate_type = DType::kF32;
  float* gate_bias = nullptr;  // [experts]
  MlpWeights experts;          // [experts] of each matrix
  MlpWeights shared;           // num_shared * moe_intermediate wide
};

// Tensors of the MTP layer besides those that every layer has.
struct MtpTensors {
  float *embedding_norm = nullptr, *hidden_norm = nullptr;  // [hidden]: of the projection's input
  WeightMatrix projection;                                  // [hidden, 2 * hidden]
  float* head_norm = nullptr;                               // [hidden]
};

struct ModelTensors {
  bf16* embedding = nullptr;         // [vocab, hidden]
  std::vector<LayerWeights> layers;  // with an MTP layer it is the last
  MtpTensors mtp;                    // null without an MTP layer
  float* final_norm = nullptr;       // [hidden]
  bf16* head = nullptr;              // [gpu_logit_columns(), hidden]
};

}  // namespace fathom::cuda
