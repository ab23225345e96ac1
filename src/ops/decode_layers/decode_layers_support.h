// The shapes that decode_layers() supports on a GPU (decode_layers_cuda.h). Host code.
#pragma once

#include <cstdint>

#include "ops/gate/gate_options.h"

namespace fathom::cuda {

struct DecodeLayersShape {
  int64_t hidden = 0, heads = 0, q_lora = 0, latent = 0, nope = 0, rope = 0, v = 0;
  int64_t num_experts = 0, inter = 0, shared_inter = 0;
  GateOptions gate;
  bool has_bf16_weights = false;  // else e4m3 with block-wise scales
};

enum class DecodeLayersKind {
  kNone,
  kV3Tp8,       // the TP8 slice of DeepSeek-V3's layers, e4m3
  kV2LiteBf16,  // DeepSeek-V2-Lite's layers
  kV2LiteE4M3,
};

namespace decode_layers_kernel {

// What all shapes share.
constexpr int kHeads = 16, kLatent = 512, kNope = 128, kRope = 64, kV = 128;

struct V3Tp8 {
  static constexpr int kHidden = 7168, kQLora = 1536, kInter = 256;
  static constexpr int kRouted = 256, kGroups = 8, kChosen = 8;
  static constexpr int kMostTokens = 16384;  // of a sequence
};

struct V2Lite {
  static constexpr int kHidden = 2048, kInter = 1408, kSharedInter = 2816;
  static constexpr int kRouted = 64, kChosen = 6;
  static constexpr int kMostTokens = 16384;
};

constexpr int kBlocks = 128;  // persistent CTAs, one per SM
constexpr int kMostRows = 4;  // tokens of a launch

}  // namespace decode_layers_kernel

// The kernel for this shape on a GPU with `num_multiprocessors` SMs.
inline DecodeLayersKind decode_layers_kind(const DecodeLayersShape& s, int num_multiprocessors) {
  using namespace decode_layers_kernel;
  if (num_multiprocessors < kBlocks || s.heads != kHeads || s.latent != kLatent ||
      s.nope != kNope || s.rope != kRope || s.v != kV) {
    return DecodeLayersKind::kNone;
  }
  if (s.hidden == V3Tp8::kHidden && s.q_lora == V3Tp8::kQLora && s.num_experts == V3Tp8::kRouted &&
      s.inter == V3Tp8::kInter && s.shared_inter == V3Tp8::kInter &&
      s.gate.scoring == GateScoring::kSigmoidBias && s.gate.num_groups == V3Tp8::kGroups &&
      s.gate.experts_per_token == V3Tp8::kChosen && !s.has_bf16_weights) {
    return DecodeLayersKind::kV3Tp8;
  }
  if (s.hidden == V2Lite::kHidden && s.q_lora == 0 && s.num_experts == V2Lite::kRouted &&
      s.inter == V2Lite::kInter && s.shared_inter == V2Lite::kSharedInter &&
      s.gate.scoring == GateScoring::kSoftmaxGreedy &&
      s.gate.experts_per_token == V2Lite::kChosen) {
    return s.has_bf16_weights ? DecodeLayersKind::kV2LiteBf16 : DecodeLayersKind::kV2LiteE4M3;
  }
  return DecodeLayersKind::kNone;
}

// Bytes of a layer's cache, all sequences' together, up to which decode_layers() takes a step of so
// many tokens. Beyond, launches for each operation are faster: latent_decode reads a latent row
// once for all heads, decode_layers() once for each, from the L2
// (docs/kernels/decode_layers.md#length).
constexpr int64_t most_decode_layers_bytes(DecodeLayersKind kind, int64_t rows) {
  switch (kind) {
    case DecodeLayersKind::kNone:
      return 0;
    case DecodeLayersKind::kV3Tp8:
      return rows == 1 ? 8'900'000 : rows == 2 ? 5'600'000 : rows == 3 ? 4'200'000 : 3'800'000;
    case DecodeLayersKind::kV2LiteBf16:
      return rows == 1 ? 7'600'000 : 4'800'000;
    default:
      return rows == 1 ? 6'900'000 : 4'200'000;
  }
}

// Tokens that a launch takes at most.
constexpr int64_t most_decode_layers_rows(DecodeLayersKind kind) {
  switch (kind) {
    case DecodeLayersKind::kNone:
      return 0;
    case DecodeLayersKind::kV3Tp8:
      return decode_layers_kernel::kMostRows;
    default:
      return 2;
  }
}

}  // namespace fathom::cuda
