#include "tensor/dtype.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace fathom {
namespace {

TEST(DType, E4M3KnownValues) {
  EXPECT_EQ(to_float(e4m3{0x7E}), 448.0f);
  EXPECT_EQ(to_float(e4m3{0x08}), 0.015625f);             // smallest normal, 2^-6
  EXPECT_EQ(to_float(e4m3{0x01}), std::ldexp(1.0f, -9));  // smallest subnormal
  EXPECT_TRUE(std::isnan(to_float(e4m3{0xFF})));
  EXPECT_EQ(to_e4m3(1e9f).bits, 0x7E);
  EXPECT_EQ(to_e4m3(-1e9f).bits, 0xFE);
}

// The reference conversion: the nearest value, found by search, ties to the even code.
template <typename T>
uint8_t nearest(float value, uint8_t largest) {
  uint8_t best = 0;
  for (int code = 0; code <= largest; ++code) {
    const float now = std::abs(to_float(T{static_cast<uint8_t>(code)}) - std::abs(value));
    const float then = std::abs(to_float(T{best}) - std::abs(value));
    if (now < then || (now == then && code % 2 == 0)) best = static_cast<uint8_t>(code);
  }
  return static_cast<uint8_t>(best | (std::signbit(value) ? 0x80 : 0));
}

TEST(DType, Fp8RoundsToNearestEven) {
  for (uint32_t bits = 0; bits < 0xFFFFFFFF - 777771; bits += 777771) {
    const auto value = std::bit_cast<float>(bits);
    if (std::isnan(value) || std::isinf(value)) continue;
    const float clamped4 = std::clamp(value, -448.0f, 448.0f);
    const float clamped5 = std::clamp(value, -57344.0f, 57344.0f);
    ASSERT_EQ(to_e4m3(value).bits, nearest<e4m3>(clamped4, 0x7E)) << value;
    ASSERT_EQ(to_e5m2(value).bits, nearest<e5m2>(clamped5, 0x7B)) << value;
  }
}

TEST(DType, Fp8RoundTrips) {
  for (int code = 0; code < 256; ++code) {
    const auto bits = static_cast<uint8_t>(code);
    if (!std::isnan(to_float(e4m3{bits}))) {
      EXPECT_EQ(to_e4m3(to_float(e4m3{bits})).bits, bits);
    }
    if (std::isfinite(to_float(e5m2{bits}))) {
      EXPECT_EQ(to_e5m2(to_float(e5m2{bits})).bits, bits);
    }
  }
}

TEST(DType, F16AndBf16RoundTrip) {
  for (uint32_t code = 0; code < 65536; ++code) {
    const auto bits = static_cast<uint16_t>(code);
    if (!std::isnan(to_float(f16{bits}))) {
      ASSERT_EQ(to_f16(to_float(f16{bits})).bits, bits);
    }
    if (!std::isnan(to_float(bf16{bits}))) {
      ASSERT_EQ(to_bf16(to_float(bf16{bits})).bits, bits);
    }
  }
  EXPECT_EQ(to_float(to_f16(65519.0f)), 65504.0f);
  EXPECT_TRUE(std::isinf(to_float(to_f16(65520.0f))));
  EXPECT_EQ(to_bf16(1.00390625f).bits, 0x3F80);  // ties to even
  EXPECT_EQ(to_bf16(1.01171875f).bits, 0x3F82);
}

}  // namespace
}  // namespace fathom
