// What the result of a softmax over inexact scores can be held to, for the tests of latent decode.
#pragma once

#include <algorithm>
#include <limits>
#include <span>

namespace fathom::cuda {

// Of a query's scores over some keys.
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
