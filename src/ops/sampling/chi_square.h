// A goodness-of-fit test of draws against a distribution. Test code only.
#pragma once

#include <cmath>
#include <limits>
#include <map>

namespace fathom {

// The chi-square statistic of draws against probabilities, over its degrees of freedom as a number
// of standard deviations (Wilson and Hilferty): 1 in 10^6 exceeds kMostDeviation. Infinite if
// something was drawn that has no probability.
inline constexpr double kMostDeviation = 4.8;

template <typename Key>
double chi_square_deviation(const std::map<Key, int>& counts,
                            const std::map<Key, double>& probabilities) {
  int draws = 0;
  for (const auto& [key, count] : counts) {
    if (!probabilities.contains(key)) return std::numeric_limits<double>::infinity();
    draws += count;
  }
  double chi_square = 0;
  for (const auto& [key, p] : probabilities) {
    const auto found = counts.find(key);
    const double count = found == counts.end() ? 0 : found->second;
    chi_square += std::pow(count - draws * p, 2) / (draws * p);
  }
  const double freedom = static_cast<double>(probabilities.size()) - 1, spread = 2 / (9 * freedom);
  return (std::cbrt(chi_square / freedom) - (1 - spread)) / std::sqrt(spread);
}

}  // namespace fathom
