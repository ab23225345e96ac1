// Scales of e4m3 values: one for 128 columns of a row of activations, one for 128x128 weights.
#pragma once

#include <bit>
#include <cstdint>

namespace fathom {

inline constexpr int64_t kScaleBlock = 128;
inline constexpr float kLargestE4M3 = 448.0f;
inline constexpr float kLeastMagnitude = 1e-30f;  // so that neither scale nor its inverse overflows

// kPowerOfTwo is called ue8m0 in checkpoints: the scale fits 8 bits, and multiplying by it is
// exact.
enum class ScaleForm : uint8_t { kF32, kPowerOfTwo };

// The least power of two that is not below `scale`, a normal number above 0.
constexpr float next_power_of_two(float scale) {
  constexpr uint32_t kMantissa = 0x7FFFFF;
  return std::bit_cast<float>((std::bit_cast<uint32_t>(scale) + kMantissa) & ~kMantissa);
}

}  // namespace fathom
