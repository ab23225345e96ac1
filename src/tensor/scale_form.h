// Scales of e4m3 values: one per 1x128 activations, one per 128x128 weights.
#pragma once

#include <bit>
#include <cstdint>

namespace fathom {

inline constexpr int64_t kScaleBlock = 128;
inline constexpr float kLargestE4M3 = 448.0f;
// So that neither the scale nor its inverse overflows.
inline constexpr float kLeastMagnitude = 1e-30f;

// kPowerOfTwo is called ue8m0 in checkpoints: the scale fits into 8 bits, and multiplying by it is
// exact.
enum class ScaleForm : uint8_t { kF32, kPowerOfTwo };

// The smallest power of two that is >= `scale`, a positive normal number.
constexpr float next_power_of_two(float scale) {
  constexpr uint32_t kMantissa = 0x7FFFFF;
  return std::bit_cast<float>((std::bit_cast<uint32_t>(scale) + kMantissa) & ~kMantissa);
}

}  // namespace fathom
