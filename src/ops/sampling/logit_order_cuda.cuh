// Comparison and summation of logits on the GPU, bitwise identical to the CPU's.
#pragma once

#include <cmath>
#include <cstdint>

#include "base/math_constants.h"

namespace fathom::cuda {

// ---- order: descending logit and, among equals, ascending id is descending order. Never 0.

inline constexpr int kIdBits = 20, kKeyBits = 32, kOrderBits = kIdBits + kKeyBits;
inline constexpr uint64_t kIdMask = (uint64_t{1} << kIdBits) - 1;
inline constexpr uint32_t kLowestFiniteKey = 0x00800000;  // of -FLT_MAX; -inf is below it

// The order key of a number that is not NaN; -0 is 0.
__device__ inline uint32_t key_of(float logit) {
  const uint32_t bits = __float_as_uint(logit + 0.0f);
  return bits & 0x80000000 ? ~bits : bits | 0x80000000;
}
__device__ inline float logit_of_key(uint32_t key) {
  return __uint_as_float(key & 0x80000000 ? key ^ 0x80000000 : ~key);
}
__device__ inline uint64_t order_of(float logit, int id) {
  return static_cast<uint64_t>(key_of(logit)) << kIdBits | (kIdMask - static_cast<uint64_t>(id));
}
__device__ inline uint32_t key_in(uint64_t order) {
  return static_cast<uint32_t>(order >> kIdBits);
}
__device__ inline float logit_in(uint64_t order) { return logit_of_key(key_in(order)); }
__device__ inline int id_in(uint64_t order) {
  return static_cast<int>(kIdMask - (order & kIdMask));
}

// Whether values are at or above an order, mostly by one comparison.
class Border {
 public:
  __device__ explicit Border(uint64_t order) : logit_(order == 0 ? -INFINITY : logit_in(order)) {
    id_ = id_in(order);
  }
  // Requires value != -infinity.
  __device__ bool keeps(float logit, int id) const {
    return logit > logit_ || (logit == logit_ && id <= id_ && logit != -INFINITY);
  }

 private:
  float logit_;
  int id_;
};

// Replaces NaN by a logit that is never chosen.
__device__ inline float comparable(float logit) { return fmaxf(logit, -INFINITY); }

// ---- terms: units_of(exp_term(…)) of ops/sampling/logit_row.h with the same roundings, and
// nothing but additions and multiplications: conversions are slow. Rounding to a whole number is
// adding a number so large that the last bit is worth 1, and the bits are then the number's.

// Adds up the units of many logits, at most 4,000 a thread: whole units of 2^-20 and of 2^-40
// apart.
class UnitSum {
 public:
  __device__ UnitSum(float max, float inverse_temperature)
      : max_(max), inverse_temperature_(inverse_temperature) {}

  __device__ void add(float logit, bool counts = true) {
    constexpr float kNearest = 12582912;  // 1.5 * 2^23: of both signs
    constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
    constexpr float kCoefficients[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6,
                                       0.5f,       1.0f,       1.0f};
    // e^-28 is less than a unit: logits below contribute none.
    constexpr float kNothing = -28;
    float x = fmaxf(__fmul_rn(__fsub_rn(logit, max_), inverse_temperature_), kNothing);
    if (!counts) x = kNothing;
    const float shifted = __fadd_rn(__fmul_rn(x, kLog2E), kNearest);
    const float n = __fsub_rn(shifted, kNearest);
    const float r = __fmaf_rn(-n, kLn2Low, __fmaf_rn(-n, kLn2High, x));
    float p = 1.0f / 5040;
#pragma unroll
    for (const float coefficient : kCoefficients) p = __fmaf_rn(p, r, coefficient);
    // 2^(n + 20): the low bits of `shifted` are n.
    const float scale = __int_as_float((__float_as_int(shifted) + 127 + kHalfBits) << 23);
    const float scaled = __fmul_rn(p, scale);
    const float whole = __fadd_rz(scaled, kDown);
    const float rest = __fsub_rn(scaled, __fsub_rn(whole, kDown));
    const float low = __fadd_rz(__fmul_rn(rest, 1 << kHalfBits), kDown);
    upper_ += __float_as_uint(whole) - __float_as_uint(kDown);
    lower_ += __float_as_uint(low) - __float_as_uint(kDown);
  }

  __device__ uint64_t units() const {
    return (static_cast<uint64_t>(upper_) << kHalfBits) + lower_;
  }

 private:
  static constexpr int kHalfBits = 20;
  static constexpr float kDown = 8388608;  // 2^23: of positive numbers, rounding down

  float max_, inverse_temperature_;
  uint32_t upper_ = 0, lower_ = 0;
};

__device__ inline uint64_t units_at(float logit, float max, float inverse_temperature) {
  UnitSum sum(max, inverse_temperature);
  sum.add(logit);
  return sum.units();
}

__device__ inline uint64_t wanted_units(double share, uint64_t total) {
  const uint64_t units = __double2ull_ru(__dmul_rn(share, __ull2double_rn(total)));
  return units < total ? units : total;
}

}  // namespace fathom::cuda
