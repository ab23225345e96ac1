// The two passes over a whole row of logits that sampling needs: the maximum of each block, and the
// sum of exponentials of each block. All other steps read only the blocks that can matter.
#pragma once

#include <cmath>
#include <cstdint>
#include <span>

#include "base/math.h"

namespace fathom {

// 64 floats are four cache lines; 129,280 logits are 2,020 blocks, whose maxima fit in L1.
inline constexpr int64_t kLogitBlock = 64;

inline int64_t num_logit_blocks(int64_t vocab) { return ceil_div(vocab, kLogitBlock); }

// maxima[b] = the largest of block b; NaN counts as -inf. maxima: num_logit_blocks(logits.size()).
void block_maxima(std::span<const float> logits, std::span<float> maxima);

// exp((logit - max) * inverse_temperature) for logit <= max, as block_exp_sums computes each term:
// relative error below 2e-7, exactly 0 below e^-87 and for NaN.
float exp_term(float logit, float max, float inverse_temperature);

// Sums of terms are of whole units of 2^-40 of the largest: integers add up to the same in any
// order, so that every instruction set and every device keeps the same tokens. A token with less
// than 1e-12 of the largest's probability has none. 2^24 terms fit.
inline constexpr float kTermUnits = 0x1p40f;
inline uint64_t units_of(float term) { return static_cast<uint64_t>(term * kTermUnits); }

// sums[b] = the units of block b's terms. Returns the sum of all.
uint64_t block_exp_sums(std::span<const float> logits, float max, float inverse_temperature,
                        std::span<uint64_t> sums);

// The least units that are at least that share of `total`.
inline uint64_t wanted_units(double share, uint64_t total) {
  const auto units = static_cast<uint64_t>(std::ceil(share * static_cast<double>(total)));
  return units < total ? units : total;
}

}  // namespace fathom
