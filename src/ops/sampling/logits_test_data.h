// Rows of logits for the tests of sampling.
#pragma once

#include <cstdint>
#include <limits>
#include <random>
#include <vector>

namespace fathom {

inline constexpr float kInf = std::numeric_limits<float>::infinity();

// Normal, with a mean of 0 and a deviation of `spread`.
inline std::vector<float> random_row(std::mt19937& random, int64_t size, float spread) {
  std::normal_distribution<float> normal(0, spread);
  std::vector<float> row(static_cast<size_t>(size));
  for (float& value : row) value = normal(random);
  return row;
}

}  // namespace fathom
