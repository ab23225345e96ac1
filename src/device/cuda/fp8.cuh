// The 8-bit floating-point types of sm_90, and f16, which holds their values: conversions two at a
// time, one instruction each. PTX ISA 9.0 is the source. Rounding is to nearest even; to 8 bits it
// saturates, as to_e4m3 and to_e5m2 (tensor/dtype.h) do.
#pragma once

#include <cstdint>

namespace fathom::cuda {

// The format of eight bits.
enum class Fp8 { kE4M3, kE5M2 };

// cvt.rn.satfinite.{e4m3x2,e5m2x2}.f32: `low` in the lower byte.
template <Fp8 kType>
__device__ inline uint32_t pack_fp8(float low, float high) {
  uint16_t packed;
  if constexpr (kType == Fp8::kE4M3) {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
  }
  return packed;
}
template <Fp8 kType>
__device__ inline uint32_t pack_fp8(float a, float b, float c, float d) {
  return pack_fp8<kType>(a, b) | pack_fp8<kType>(c, d) << 16;
}

// cvt.rn.f16x2.{e4m3x2,e5m2x2}, of the lower or the upper two of four bytes: exact.
template <Fp8 kType>
__device__ inline uint32_t fp8_to_f16(uint32_t bytes) {
  uint32_t wide;
  if constexpr (kType == Fp8::kE4M3) {
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, low;\n}"
        : "=r"(wide)
        : "r"(bytes));
  } else {
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e5m2x2 %0, low;\n}"
        : "=r"(wide)
        : "r"(bytes));
  }
  return wide;
}
template <Fp8 kType>
__device__ inline uint32_t upper_fp8_to_f16(uint32_t bytes) {
  uint32_t wide;
  if constexpr (kType == Fp8::kE4M3) {
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, high;\n}"
        : "=r"(wide)
        : "r"(bytes));
  } else {
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e5m2x2 %0, high;\n}"
        : "=r"(wide)
        : "r"(bytes));
  }
  return wide;
}

// cvt.f32.f16, for both halves.
__device__ inline float2 widen_f16(uint32_t pair) {
  float2 wide;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\n"
      "cvt.f32.f16 %1, high;\n}"
      : "=f"(wide.x), "=f"(wide.y)
      : "r"(pair));
  return wide;
}

// Converts four bytes, the lowest first.
template <Fp8 kType>
__device__ inline float4 widen_fp8(uint32_t bytes) {
  const float2 low = widen_f16(fp8_to_f16<kType>(bytes));
  const float2 high = widen_f16(upper_fp8_to_f16<kType>(bytes));
  return {low.x, low.y, high.x, high.y};
}

}  // namespace fathom::cuda
