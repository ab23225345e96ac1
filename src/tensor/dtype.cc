#include "tensor/dtype.h"

#include <array>

namespace fathom {
namespace {

// Rounds |value| to nearest even in a float format with `kMantissaBits` and exponent bias `kBias`.
// Finite values saturate at `largest` (a bit pattern); infinity and NaN give `infinity` and `nan`.
template <int kMantissaBits, int kBias>
uint32_t encode_magnitude(float value, uint32_t largest, uint32_t infinity, uint32_t nan) {
  const uint32_t bits = std::bit_cast<uint32_t>(value) & 0x7FFFFFFF;
  if (bits > 0x7F800000) return nan;
  if (bits == 0x7F800000) return infinity;
  const int exponent = static_cast<int>(bits >> 23) - 127;
  constexpr int kDropped = 23 - kMantissaBits;
  if (exponent < 1 - kBias) {
    // Subnormal: a multiple of the smallest one, rounded to nearest even.
    const float unit = std::ldexp(1.0f, 1 - kBias - kMantissaBits);
    return static_cast<uint32_t>(std::nearbyint(std::bit_cast<float>(bits) / unit));
  }
  const uint32_t rounded = bits + ((1u << (kDropped - 1)) - 1) + (bits >> kDropped & 1);
  const uint32_t encoded =
      (rounded >> kDropped) - (static_cast<uint32_t>(127 - kBias) << kMantissaBits);
  return encoded > largest ? largest : encoded;
}

template <int kMantissaBits, int kBias>
float decode_magnitude(uint32_t bits) {
  const uint32_t exponent = bits >> kMantissaBits;
  const uint32_t mantissa = bits & ((1u << kMantissaBits) - 1);
  if (exponent == 0) {
    return std::ldexp(static_cast<float>(mantissa), 1 - kBias - kMantissaBits);
  }
  return std::ldexp(static_cast<float>(mantissa | 1u << kMantissaBits),
                    static_cast<int>(exponent) - kBias - kMantissaBits);
}

float with_sign(float magnitude, uint32_t sign) { return sign != 0 ? -magnitude : magnitude; }

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::array<float, 256> make_e4m3_table() {
  std::array<float, 256> table{};
  for (uint32_t bits = 0; bits < 256; ++bits) {
    const uint32_t magnitude = bits & 0x7F;
    table[bits] =
        magnitude == 0x7F ? kNan : with_sign(decode_magnitude<3, 7>(magnitude), bits & 0x80);
  }
  return table;
}

std::array<float, 256> make_e5m2_table() {
  std::array<float, 256> table{};
  for (uint32_t bits = 0; bits < 256; ++bits) {
    const uint32_t magnitude = bits & 0x7F;
    const float value = magnitude > 0x7C    ? kNan
                        : magnitude == 0x7C ? kInfinity
                                            : decode_magnitude<2, 15>(magnitude);
    table[bits] = with_sign(value, bits & 0x80);
  }
  return table;
}

}  // namespace

std::string_view name_of(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "f32";
    case DType::kBF16:
      return "bf16";
    case DType::kF16:
      return "f16";
    case DType::kF8E4M3:
      return "e4m3";
    case DType::kF8E5M2:
      return "e5m2";
    case DType::kF8E8M0:
      return "e8m0";
    case DType::kI32:
      return "i32";
    case DType::kI64:
      return "i64";
    case DType::kU8:
      return "u8";
  }
  return "?";
}

float to_float(f16 value) {
  const uint32_t magnitude = value.bits & 0x7FFF;
  const float decoded = magnitude > 0x7C00    ? kNan
                        : magnitude == 0x7C00 ? kInfinity
                                              : decode_magnitude<10, 15>(magnitude);
  return with_sign(decoded, value.bits & 0x8000);
}

float to_float(e4m3 value) {
  static const std::array<float, 256> table = make_e4m3_table();
  return table[value.bits];
}

float to_float(e5m2 value) {
  static const std::array<float, 256> table = make_e5m2_table();
  return table[value.bits];
}

f16 to_f16(float value) {
  // Unlike FP8, f16 overflows to infinity: values that round past 65504 are not representable.
  uint32_t magnitude = encode_magnitude<10, 15>(value, 0x7C00, 0x7C00, 0x7E00);
  return {static_cast<uint16_t>(magnitude | (std::signbit(value) ? 0x8000 : 0))};
}

e4m3 to_e4m3(float value) {
  const uint32_t magnitude = encode_magnitude<3, 7>(value, 0x7E, 0x7E, 0x7F);
  return {static_cast<uint8_t>(magnitude | (std::signbit(value) ? 0x80 : 0))};
}

e5m2 to_e5m2(float value) {
  const uint32_t magnitude = encode_magnitude<2, 15>(value, 0x7B, 0x7B, 0x7E);
  return {static_cast<uint8_t>(magnitude | (std::signbit(value) ? 0x80 : 0))};
}

float e8m0_to_float(uint8_t bits) {
  return bits == 0xFF ? kNan : std::ldexp(1.0f, static_cast<int>(bits) - 127);
}

}  // namespace fathom
