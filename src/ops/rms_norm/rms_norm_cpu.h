// The CPU form of rms_norm, and the part that fused operations share.
#pragma once

#include "device/cpu/thread_pool.h"
#include "tensor/tensor_view.h"

namespace fathom::cpu {

// Lanes of a sum: the order of addition is the same on every target, and the compiler vectorises
// it.
inline constexpr int kRmsLanes = 16;

// 1 / sqrt(mean(x^2) + eps) of n values. Inlined, to be compiled for the caller's instructions.
template <typename T>
[[gnu::always_inline]] inline float inverse_rms(const T* x, int64_t n, float eps) {
  float lanes[kRmsLanes] = {};
  int64_t i = 0;
  for (; i + kRmsLanes <= n; i += kRmsLanes) {
    for (int lane = 0; lane < kRmsLanes; ++lane) {
      const float value = to_float(x[i + lane]);
      lanes[lane] += value * value;
    }
  }
  for (int lane = 0; i < n; ++i, ++lane) lanes[lane] += to_float(x[i]) * to_float(x[i]);
  for (int width = kRmsLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return 1.0f / __builtin_sqrtf(lanes[0] / static_cast<float>(n) + eps);
}

void rms_norm(ThreadPool& pool, ConstTensorView x, ConstTensorView weight, float eps,
              TensorView out);

}  // namespace fathom::cpu
