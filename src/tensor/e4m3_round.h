// Rounding to e4m3 without branches or tables: what compilers turn into vector code inside a loop.
// The same codes as to_e4m3() (dtype.h) for every value.
#pragma once

#include <bit>
#include <cstdint>

namespace fathom {

// Nearest even, saturating at +-448; NaN keeps its sign. Inlined, to be compiled for the caller's
// instructions.
[[gnu::always_inline]] inline uint8_t round_to_e4m3(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  // Normal codes: 20 bits of mantissa dropped, the exponent's bias changed from 127 to 7.
  const uint32_t rounded = (magnitude + 0x7FFFF + (magnitude >> 20 & 1)) >> 20;
  const uint32_t normal = rounded < 0x43E ? rounded - (120u << 3) : 0x7Eu;
  // Below 2^-6 codes count units of 2^-9, which is what the last place of 2^14 is worth.
  const uint32_t subnormal =
      std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0x1p14f) & 0xFF;
  const uint32_t finite = magnitude < 0x3C800000 ? subnormal : normal;
  const uint32_t code = magnitude > 0x7F800000 ? 0x7Fu : finite;
  return static_cast<uint8_t>(code | (bits >> 24 & 0x80));
}

}  // namespace fathom
