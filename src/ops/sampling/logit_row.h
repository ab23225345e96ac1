// The two passes over a whole row of logits that sampling needs: the largest of each block, and the
// sum of exponentials of each block. All else looks only at the blocks that can matter.
#pragma once

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

// sums[b] = the sum of exp_term over block b, in double. Returns the sum of all.
double block_exp_sums(std::span<const float> logits, float max, float inverse_temperature,
                      std::span<double> sums);

}  // namespace fathom
