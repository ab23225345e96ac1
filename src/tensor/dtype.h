// Element types and their conversions.
//
// bf16 is the upper half of an fp32. e4m3 is the "fn" form (bias 7, no infinities, NaN 0x7F/0xFF,
// largest value 448); e5m2 has infinities and NaN as in IEEE 754. Conversions to a narrower type
// round to nearest even; those to FP8 saturate at the largest finite value.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string_view>

namespace fathom {

enum class DType : uint8_t { kF32, kBF16, kF16, kF8E4M3, kF8E5M2, kF8E8M0, kI32, kI64, kU8 };

constexpr int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kBF16:
    case DType::kF16:
      return 2;
    case DType::kF8E4M3:
    case DType::kF8E5M2:
    case DType::kF8E8M0:
    case DType::kU8:
      return 1;
    case DType::kI64:
      return 8;
  }
  return 0;
}

std::string_view name_of(DType dtype);

struct bf16 {
  uint16_t bits = 0;
};
struct f16 {
  uint16_t bits = 0;
};
struct e4m3 {
  uint8_t bits = 0;
};
struct e5m2 {
  uint8_t bits = 0;
};

constexpr float to_float(bf16 value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}
float to_float(f16 value);
float to_float(e4m3 value);
float to_float(e5m2 value);
constexpr float to_float(float value) { return value; }

constexpr bf16 to_bf16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return {static_cast<uint16_t>(bits >> 16 | 0x40)};
  return {static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)};
}
f16 to_f16(float value);
e4m3 to_e4m3(float value);
e5m2 to_e5m2(float value);

// Converts an e8m0 scale: 2^(bits - 127); 0xFF is NaN.
float e8m0_to_float(uint8_t bits);

// The DType of a C++ element type.
template <typename T>
struct DTypeOf;
template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::kF32;
};
template <>
struct DTypeOf<bf16> {
  static constexpr DType value = DType::kBF16;
};
template <>
struct DTypeOf<f16> {
  static constexpr DType value = DType::kF16;
};
template <>
struct DTypeOf<e4m3> {
  static constexpr DType value = DType::kF8E4M3;
};
template <>
struct DTypeOf<e5m2> {
  static constexpr DType value = DType::kF8E5M2;
};
template <>
struct DTypeOf<int32_t> {
  static constexpr DType value = DType::kI32;
};
template <>
struct DTypeOf<int64_t> {
  static constexpr DType value = DType::kI64;
};
template <>
struct DTypeOf<uint8_t> {
  static constexpr DType value = DType::kU8;
};
template <typename T>
inline constexpr DType kDTypeOf = DTypeOf<std::remove_const_t<T>>::value;

}  // namespace fathom
