// Counter-based random numbers: number i of a stream is a pure function of (seed, stream, i), so a
// sequence's samples and a dummy weight do not depend on what else is computed, or when. The mixing
// function is that of SplitMix64 (Steele, Lea, Flood 2014).
#pragma once

#include <cstdint>

namespace fathom {

constexpr uint64_t mix64(uint64_t x) {
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

constexpr uint64_t random_bits(uint64_t seed, uint64_t stream, uint64_t index) {
  return mix64(mix64(mix64(seed) ^ stream) ^ index);
}

// Uniform in [0, 1), 53 bits.
constexpr double random_uniform(uint64_t seed, uint64_t stream, uint64_t index) {
  return static_cast<double>(random_bits(seed, stream, index) >> 11) * 0x1.0p-53;
}

}  // namespace fathom
