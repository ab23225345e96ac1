// Scores in double precision, and what the result of a softmax over inexact scores can be held to:
// for the tests of latent decode, over pages and over chosen keys.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include "device/cuda/random_data.h"

namespace fathom::cuda {

// Factors of latents and queries, with logits of up to some 2^34.
struct LogitSizes {
  float latents, queries;
};
inline constexpr LogitSizes kLogitSizes[] = {{1, 1},       {1, 1e3f}, {1e2f, 1e2f}, {1e2f, 1e6f},
                                             {1e4f, 1e3f}, {1e7f, 1}, {1e7f, 1e3f}};

struct DoubleScore {
  double value = 0, magnitude = 0;  // sum of products, sum of their absolute values
};

// Score of a bf16 query; `key`: the latent part, then the rotary part.
inline DoubleScore score_in_double(std::span<const uint16_t> q_latent,
                                   std::span<const uint16_t> q_rope, const float* key) {
  DoubleScore score;
  const auto add = [&](std::span<const uint16_t> query, const float* values) {
    for (size_t i = 0; i < query.size(); ++i) {
      const double product = static_cast<double>(from_bf16(query[i])) * values[i];
      score.value += product;
      score.magnitude += std::abs(product);
    }
  };
  add(q_latent, key);
  add(q_rope, key + q_latent.size());
  return score;
}

// Certainty of a query's scores over some keys.
struct ScoreCertainty {
  double error = 0;        // no score is further off
  bool is_certain = true;  // whether such errors leave the result as it is
};

// `magnitude`: the largest sum of absolute products of a score, `resolution`: of the arithmetic.
// Large scores leave one key, unless another is nearer to the largest than both may be off.
inline ScoreCertainty certainty_of(std::span<const double> scores, double magnitude,
                                   double resolution) {
  constexpr double kSmall = 1e-3, kNothing = 20;  // e^-20 counts as nothing
  ScoreCertainty found{.error = resolution * magnitude};
  if (found.error <= kSmall) return found;
  double best = -std::numeric_limits<double>::infinity(), second = best;
  for (const double score : scores) {
    second = std::max(second, std::min(best, score));
    best = std::max(best, score);
  }
  found.is_certain = best - second > 2 * found.error + kNothing;
  return found;
}

// Products and sums of the kernels over any cache: f16 rounds a value's scale and its product with
// the value by 2^-11 each, two e4m3 values round a query by 2^-9.
inline constexpr double kScoreResolution = 0x1p-9;

}  // namespace fathom::cuda
