// The one shape that decode_layers() supports on a GPU (decode_layers_cuda.h). Host code.
#pragma once

#include <cstdint>

#include "ops/gate/gate_options.h"

namespace fathom::cuda {

struct DecodeLayersShape {
  int64_t hidden = 0, heads = 0, q_lora = 0, latent = 0, nope = 0, rope = 0, v = 0;
  int64_t num_experts = 0, inter = 0, shared_inter = 0;
  GateOptions gate;
};

namespace decode_layers_kernel {

// An eighth of DeepSeek-V3's layers.
constexpr int kHidden = 7168, kHeads = 16, kQLora = 1536, kLatent = 512, kNope = 128, kRope = 64,
              kV = 128, kInter = 256;
constexpr int kRouted = 256, kGroups = 8;
constexpr int kChosen = 8;

constexpr int kBlocks = 128;  // persistent CTAs, one per SM

}  // namespace decode_layers_kernel

// Whether a kernel exists for this shape on a GPU with `num_multiprocessors` SMs.
inline bool decode_layers_takes(const DecodeLayersShape& s, int num_multiprocessors) {
  using namespace decode_layers_kernel;
  return s.hidden == kHidden && s.heads == kHeads && s.q_lora == kQLora && s.latent == kLatent &&
         s.nope == kNope && s.rope == kRope && s.v == kV && s.num_experts == kRouted &&
         s.inter == kInter && s.shared_inter == kInter &&
         s.gate.scoring == GateScoring::kSigmoidBias && s.gate.num_groups == kGroups &&
         s.gate.experts_per_token == kChosen && num_multiprocessors >= kBlocks;
}

}  // namespace fathom::cuda
