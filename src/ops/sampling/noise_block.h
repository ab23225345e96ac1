// Random words of a block's 64 tokens at once, and which of them are small enough to matter: a
// large g is a small word, so most blocks of a row are passed over after this comparison.
#pragma once

#include <array>
#include <cstdint>

#include "device/cpu/isa.h"
#include "ops/sampling/gumbel_noise.h"
#include "ops/sampling/logit_row.h"

namespace fathom {

// A lane for each token of a block, in the order of vector code: all first tokens of the groups,
// then all second ones.
class NoiseBlock {
 public:
  static constexpr int kGroups = kLogitBlock / kNoiseGroup;

  // The block's token whose lane this is.
  static constexpr int token(int lane) { return lane % kGroups * kNoiseGroup + lane / kGroups; }
  // The upper half of its n.
  uint32_t upper(int lane) const { return static_cast<uint32_t>(lanes[lane]); }

  // Only the low halves count.
  alignas(64) std::array<uint64_t, kLogitBlock> lanes;
};

// Fills `out` with the words of tokens kLogitBlock * block and up. Returns a bit for each lane
// whose word has none of the bits of `zeros`. Every level computes the same words.
using FillNoiseBlock = uint64_t (*)(const NoiseKey& key, int64_t block, uint32_t zeros,
                                    NoiseBlock& out);
FillNoiseBlock fill_noise_block(CpuIsa isa);

}  // namespace fathom
