// Scores of the race on the GPU: an estimate for every token, and the CPU's bits for the few whose
// estimates come close to the best.
#pragma once

#include <cmath>
#include <cstdint>

#include "ops/sampling/gumbel_noise.h"
#include "ops/sampling/logit_order_cuda.cuh"

namespace fathom::cuda {

// An unsigned number in the order of scores, which are finite. Never 0.
__device__ inline uint64_t order_of_score(double score) {
  const auto bits = static_cast<uint64_t>(__double_as_longlong(score));
  return bits >> 63 != 0 ? ~bits : bits | uint64_t{1} << 63;
}

// A call: it is rare, and too long to stand in an unrolled loop.
__device__ __noinline__ inline double called_token_noise(NoiseKey key, int id, uint32_t upper) {
  return token_noise(key, id, upper);
}

// The score's order, as the CPU compares it.
__device__ inline uint64_t exact_score(float logit, float inverse_temperature, NoiseKey key, int id,
                                       uint32_t upper) {
  return order_of_score(race_score(logit, inverse_temperature, called_token_noise(key, id, upper)));
}

__device__ inline uint32_t upper_word(NoiseKey key, int id) {
  const PhiloxWords words = noise_words(key, static_cast<uint32_t>(id) / kNoiseGroup);
  const uint32_t first = id & 1 ? words.words[1] : words.words[0];
  const uint32_t second = id & 1 ? words.words[3] : words.words[2];
  return id & 2 ? second : first;
}

// score - max * inverse_temperature: at least `low`, at most `high`, but for kEstimateError.
struct Estimate {
  float low, high;
};

// What the upper half of n leaves open between the ends (2.5e-4), roundings and approximate
// logarithms (3e-5).
inline constexpr float kEstimateError = 1e-3f;

__device__ inline Estimate estimated_score(float logit, float max, float inverse_temperature,
                                           uint32_t upper) {
  // Nearer to 0 or 1 the upper half of n leaves more open: two tokens in a million.
  constexpr uint32_t kEnd = 1u << 12;
  constexpr float kUnit = 0x1p-32f, kSmall = 1.0f / 32, kMostNoise = 45;
  const float x = __fmul_rn(__fsub_rn(logit, max), inverse_temperature);
  // The least g that there can be: from the largest v, of the least 1 - v.
  const float v = (__uint2float_rn(upper) + 1) * kUnit;
  const float series = v * (1 + v * (1.0f / 2 + v * (1.0f / 3 + v * (1.0f / 4 + v * (1.0f / 5)))));
  const float logarithm = -__logf(__uint2float_rn(~upper) * kUnit);
  const float low = x - __logf(v < kSmall ? series : logarithm);
  return {low, upper + kEnd < 2 * kEnd ? x + kMostNoise : low};
}

// What a token's `high` must reach for it to be the winner where `low` is the largest of the row's.
// Scores of large numbers are rounded more coarsely than estimates, which are differences.
__device__ inline float least_estimate(float low, float max, float inverse_temperature) {
  return low - (2 * kEstimateError + fabsf(max * inverse_temperature) * 0x1p-48f);
}

}  // namespace fathom::cuda
