// The noise of a draw, which host code and kernels compute to the same bits.
//
// A draw takes the token with the largest logit / temperature + g, g a Gumbel number of its own for
// each token (Gumbel-max): token i wins with probability softmax_i. g = -ln E, E = -ln(1 - v) is
// exponential, and v = n / 2^64 is uniform: n is odd, so v is never 0 or 1. The upper half of n
// decides nearly always; only who may still win needs the lower half and the logarithms.
//
// v near 0 is where large g come from, and there v has all 64 bits: g ranges from -3.8 to 44.4, and
// even a token of probability 1e-15 wins as often as it should. (With 32 bits g ends at 22, and
// tokens below 1e-10 never win.)
//
// Why the bits are equal everywhere: random words and logarithms are integer arithmetic alone. A
// score is one rounding: a product of two floats is exact in double, so that it does not matter
// whether a compiler contracts it with the addition.
#pragma once

#include <cstdint>

#include "base/host_device.h"
#include "base/philox.h"
#include "base/random.h"

namespace fathom {

// What one draw's noise is a function of, beside the token.
struct NoiseKey {
  uint64_t stream = 0;    // of the seed and the choice
  uint64_t position = 0;  // of the new token in its sequence: no two draws of a stream share one
};

constexpr NoiseKey noise_key(uint64_t seed, uint64_t choice, uint64_t position) {
  return {mix64(mix64(seed) ^ choice), position};
}

// Tokens that share a call of Philox: words of ids 4 * group to 4 * group + 3.
inline constexpr int kNoiseGroup = 4;

// The upper half of each token's n; `lower`: the lower half.
FATHOM_HOST_DEVICE constexpr PhiloxWords noise_words(const NoiseKey& key, uint32_t group,
                                                     bool lower = false) {
  return philox({{group, lower, static_cast<uint32_t>(key.position),
                  static_cast<uint32_t>(key.position >> 32)}},
                key.stream);
}

FATHOM_HOST_DEVICE constexpr uint64_t high_product(uint64_t a, uint64_t b) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b >> 64);
}

FATHOM_HOST_DEVICE constexpr int leading_zeros(uint64_t n) {
#ifdef __CUDA_ARCH__
  return __clzll(static_cast<long long>(n));
#else
  return __builtin_clzll(n);
#endif
}

// Logarithms are in units of 2^-57.
inline constexpr int kLogBits = 57;
inline constexpr uint64_t kLn2 = 0xB17217F7D1CF79AB >> (64 - kLogBits);

// -ln(n / 2^64) for n > 0, within 2^-51.
//
// n / 2^64 = f * 2^-e with f from 3/4 to 3/2, and ln f = 2 atanh(s), s = (f - 1) / (f + 1): below
// 1/5, so that the series ends at s^19 / 19. All fractions are of 2^64 unless another is named.
FATHOM_HOST_DEVICE constexpr uint64_t minus_log(uint64_t n) {
  const int zeros = leading_zeros(n);
  const uint64_t mantissa = n << zeros;
  const bool is_upper = mantissa >= 0xC000000000000000;
  const uint64_t f = is_upper ? mantissa >> 1 : mantissa;  // of 2^63
  constexpr uint64_t kOne = uint64_t{1} << 63;
  const bool is_below_1 = f < kOne;
  const uint64_t distance = (is_below_1 ? kOne - f : f - kOne) << 1;
  const uint64_t sum = (f >> 1) + (kOne >> 1);  // of 2^62
  // 1 / sum: a quotient of 30 bits, and one step of Newton's.
  const uint64_t guess = ~uint64_t{0} / (sum >> 32) << 30;
  const uint64_t inverse = high_product(guess, kOne - high_product(sum, guess)) << 2;
  const uint64_t s = high_product(distance, inverse), square = high_product(s, s);
  uint64_t tail = 0;
  for (uint64_t odd = 19; odd >= 3; odd -= 2) {
    tail = high_product(square, ~uint64_t{0} / odd + tail);
  }
  const uint64_t log = (s + high_product(s, tail)) >> (63 - kLogBits);
  const uint64_t whole = static_cast<uint64_t>(is_upper ? zeros : zeros + 1) * kLn2;
  return is_below_1 ? whole + log : whole - log;
}

// g of an odd n, within 2^-44.
FATHOM_HOST_DEVICE constexpr double gumbel(uint64_t n) {
  int64_t units = 0;
  if (n >> 52 != 0) {
    const uint64_t exponential = minus_log(0 - n);  // E, of 2^57
    units =
        static_cast<int64_t>(minus_log(exponential)) - static_cast<int64_t>((64 - kLogBits) * kLn2);
  } else {
    // 1 - v keeps too little of a small v: ln E = ln v + v / 2 + 5 v^2 / 24 + v^3 / 8 + ...
    const uint64_t square = high_product(n, n), cube = high_product(square, n);
    units = static_cast<int64_t>(minus_log(n)) -
            static_cast<int64_t>(((n >> 1) + square * 5 / 24 + (cube >> 3)) >> (64 - kLogBits));
  }
  return static_cast<double>(units) * (1.0 / (uint64_t{1} << kLogBits));
}

// g of a token whose upper half is `upper`.
FATHOM_HOST_DEVICE constexpr double token_noise(const NoiseKey& key, int32_t id, uint32_t upper) {
  const auto place = static_cast<uint32_t>(id);
  const PhiloxWords lower = noise_words(key, place / kNoiseGroup, true);
  // No indexing, which would put the words into a kernel's local memory.
  const uint32_t first = place & 1 ? lower.words[1] : lower.words[0];
  const uint32_t second = place & 1 ? lower.words[3] : lower.words[2];
  return gumbel(uint64_t{upper} << 32 | (place & 2 ? second : first) | 1);
}

// What the tokens of a draw are compared by; equals go to the lowest id.
FATHOM_HOST_DEVICE constexpr double race_score(float logit, float inverse_temperature,
                                               double noise) {
  return static_cast<double>(logit) * static_cast<double>(inverse_temperature) + noise;
}

}  // namespace fathom
