// The Walsh-Hadamard transform of one row in natural (Sylvester) order, times n^-1/2: its own
// inverse. In fp32; n is a power of two.
#pragma once

#include <cmath>
#include <cstdint>

namespace fathom::cpu {

// One stage of butterflies at distance `step` inside registers of 16: lane i becomes x[i] + x[i ^
// step], or their difference where bit `step` of i is set.
using FloatLanes = float __attribute__((vector_size(64)));

template <int kStep>
[[gnu::always_inline]] inline void hadamard_lanes(FloatLanes& x) {
  constexpr auto partner = [](int lane) { return lane ^ kStep; };
  constexpr auto sign = [](int lane) { return (lane & kStep) != 0 ? -1.0f : 1.0f; };
  const FloatLanes other = __builtin_shufflevector(
      x, x, partner(0), partner(1), partner(2), partner(3), partner(4), partner(5), partner(6),
      partner(7), partner(8), partner(9), partner(10), partner(11), partner(12), partner(13),
      partner(14), partner(15));
  const FloatLanes signs = {sign(0),  sign(1),  sign(2),  sign(3), sign(4),  sign(5),
                            sign(6),  sign(7),  sign(8),  sign(9), sign(10), sign(11),
                            sign(12), sign(13), sign(14), sign(15)};
  x = x * signs + other;
}

// x [n] in place. Inlined, to be compiled for the caller's instructions.
[[gnu::always_inline]] inline void hadamard(float* x, int64_t n) {
  constexpr int64_t kLanes = 16;
  int64_t step = 1;
  if (n >= kLanes) {
    for (int64_t i = 0; i < n; i += kLanes) {
      FloatLanes lanes;
      __builtin_memcpy(&lanes, x + i, sizeof lanes);
      hadamard_lanes<1>(lanes);
      hadamard_lanes<2>(lanes);
      hadamard_lanes<4>(lanes);
      hadamard_lanes<8>(lanes);
      __builtin_memcpy(x + i, &lanes, sizeof lanes);
    }
    step = kLanes;
  }
  for (; step < n; step *= 2) {
    for (int64_t block = 0; block < n; block += 2 * step) {
      for (int64_t i = block; i < block + step; ++i) {
        const float a = x[i], b = x[i + step];
        x[i] = a + b;
        x[i + step] = a - b;
      }
    }
  }
  const float factor = 1.0f / std::sqrt(static_cast<float>(n));
  for (int64_t i = 0; i < n; ++i) x[i] *= factor;
}

}  // namespace fathom::cpu
