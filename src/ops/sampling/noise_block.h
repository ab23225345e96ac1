// Random words of a block's 64 tokens at once, and whether any of them is small enough to matter:
// a large g is a small word, so most blocks of a row are passed over after this comparison.
#pragma once

#include <array>
#include <cstdint>

#include "device/cpu/isa.h"
#include "ops/sampling/gumbel_noise.h"
#include "ops/sampling/logit_row.h"

namespace fathom {

// The words of a block, groups side by side: what the vector code computes, in its order.
class NoiseBlock {
 public:
  static constexpr int kGroups = kLogitBlock / kNoiseGroup;

  // The upper half of n of the block's i-th token.
  uint32_t upper(int64_t i) const {
    return static_cast<uint32_t>(lanes[i % kNoiseGroup][i / kNoiseGroup]);
  }

  // Only the low half of a lane counts.
  alignas(64) std::array<std::array<uint64_t, kGroups>, kNoiseGroup> lanes;
};

// Fills `out` with the words of tokens kLogitBlock * block and up. Returns whether one of them has
// none of the bits of `zeros`. Every level computes the same words.
using FillNoiseBlock = bool (*)(const NoiseKey& key, int64_t block, uint32_t zeros,
                                NoiseBlock& out);
FillNoiseBlock fill_noise_block(CpuIsa isa);

}  // namespace fathom
