// References of the softmaxes of latent decode: a row's probabilities are relative to one of its
// largest scores so far.
//
// Scores and references are query-key dot products; the factor to base 2 logarithms multiplies
// their difference, which is exact where it matters. A reference that is multiplied by itself is
// rounded: from 2^24 on by whole powers of two, beyond what a probability can hold.
#pragma once

namespace fathom::cuda {

// The reference of a row that has seen no key: below all scores, and finite, so that a masked score
// (-infinity) minus it is no NaN.
constexpr float kNoReference = -3e38f;

// The base 2 logarithm of a score's exponential relative to the reference's, times 2^bias.
__device__ inline float above_reference(float score, float reference, float scale_log2,
                                        float bias = 0) {
  return fmaf(score - reference, scale_log2, bias);
}

}  // namespace fathom::cuda
