// Logits as the sampler on a GPU compares and adds them: the same numbers as on the CPU, to the
// bit.
#pragma once

#include <cmath>
#include <cstdint>

namespace fathom::cuda {

// ---- order: descending logit and, among equals, ascending id is descending order. Never 0.

inline constexpr int kIdBits = 20, kKeyBits = 32, kOrderBits = kIdBits + kKeyBits;
inline constexpr uint64_t kIdMask = (uint64_t{1} << kIdBits) - 1;
inline constexpr uint32_t kLowestFiniteKey = 0x00800000;  // of -FLT_MAX; -inf is below it

// Of a number (not NaN, not -0).
__device__ inline uint32_t key_of(float logit) {
  const uint32_t bits = __float_as_uint(logit);
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

// A logit that nobody chooses stands for NaN; -0 is 0.
__device__ inline float comparable(float logit) {
  return logit == logit ? logit + 0.0f : -INFINITY;
}

// ---- terms: exp_term() and units_of() of ops/sampling/logit_row.h, operation by operation

__device__ inline float exp_term(float logit, float max, float inverse_temperature) {
  constexpr float kLog2E = 1.44269504f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  constexpr float kCoefficients[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
  const float x = __fmul_rn(__fsub_rn(logit, max), inverse_temperature);
  if (!(x >= -87)) return 0;
  const float n = rintf(__fmul_rn(x, kLog2E));
  const float r = __fmaf_rn(-n, kLn2Low, __fmaf_rn(-n, kLn2High, x));
  float p = 1.0f / 5040;
#pragma unroll
  for (const float coefficient : kCoefficients) p = __fmaf_rn(p, r, coefficient);
  return __fmul_rn(p, __int_as_float((static_cast<int>(n) + 127) << 23));
}

__device__ inline uint64_t units_of(float term) { return __float2ull_rz(__fmul_rn(term, 0x1p40f)); }

__device__ inline uint64_t drawn_units(double share, uint64_t total) {
  const uint64_t units = __double2ull_rz(__dmul_rn(share, __ull2double_rn(total)));
  return units < total ? units : total - 1;
}
__device__ inline uint64_t wanted_units(double share, uint64_t total) {
  const uint64_t units = __double2ull_ru(__dmul_rn(share, __ull2double_rn(total)));
  return units < total ? units : total;
}

}  // namespace fathom::cuda
