// Values of ranks for the tests of collectives, and their comparison.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "base/random.h"

namespace fathom {

// Values whose sum depends on the order: they differ in size by 2^40.
inline float value_of(int rank, uint64_t seed, int64_t i) {
  const uint64_t bits = random_bits(seed, rank, i);
  const double scale = std::ldexp(1.0, static_cast<int>(bits % 41) - 20);
  return static_cast<float>((static_cast<double>(bits >> 11) * 0x1p-52 - 1.0) * scale);
}

inline std::vector<float> values_of(int rank, uint64_t seed, int64_t count) {
  std::vector<float> values(count);
  for (int64_t i = 0; i < count; ++i) values[i] = value_of(rank, seed, i);
  return values;
}

inline bool equal_bits(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size_bytes()) == 0);
}

}  // namespace fathom
