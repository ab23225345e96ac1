// The order of scores as whole numbers: top_keys.h's order by value, -0 = +0, NaN below everything.
#pragma once

#include <bit>
#include <cstdint>

namespace fathom::cpu {

// Greater for a greater score; 0 for NaN. Works on the bits, so denormals count whatever the CPU's
// floating-point mode is. Inlined, to be compiled for the caller's instructions.
[[gnu::always_inline]] inline uint32_t order_of(float score) {
  const auto bits = std::bit_cast<uint32_t>(score);
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  const uint32_t signed_order =
      (bits >> 31) != 0 && magnitude != 0 ? ~bits : magnitude | 0x80000000;
  return magnitude > 0x7F800000 ? 0 : signed_order;
}

}  // namespace fathom::cpu
