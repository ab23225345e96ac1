// Four-bit weights: what a code stands for, and the scales of groups of columns.
//
//   W[r, c] = value(code[r, c]) * scale[r, g]          g = c / columns of a group
//
//   kInteger  value = code - zero[r, g]; zero is 8 in symmetric formats (INT4, AWQ, GPTQ)
//   kE2m1     value = 0, 0.5, 1, 1.5, 2, 3, 4, 6 for codes 0 to 7, negative for 8 to 15
//             (MXFP4, NVFP4)
//
// Every value is exact in bf16.
//
// Source: OCP Microscaling Formats (MX) v1.0, section 5.3.3 (E2M1).
#pragma once

#include <cstdint>

namespace fathom {

enum class FourBitCode : uint8_t { kInteger, kE2m1 };

inline constexpr int kFourBitCodes = 16;
inline constexpr int kSymmetricZero = 8;  // code of 0 where no zero points are stored

// The value of `code` (0 to 15); `zero` counts for integers only.
constexpr float four_bit_value(FourBitCode form, int code, int zero) {
  if (form == FourBitCode::kInteger) return static_cast<float>(code - zero);
  constexpr float kMagnitudes[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  return code < 8 ? kMagnitudes[code] : -kMagnitudes[code - 8];
}

}  // namespace fathom
