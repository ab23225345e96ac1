// A token's sum over its experts' results, eight columns a thread. All kernels that combine add so:
// the same results in the same order give the same bits.
#pragma once

#include <cstdint>

#include "device/cuda/ptx.cuh"

namespace fathom::cuda {

// sum += weight * eight values of bf16.
__device__ inline void add_scaled(float (&sum)[8], const uint4& values, float weight) {
  const uint32_t words[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[2 * i] += weight * __uint_as_float(words[i] << 16);
    sum[2 * i + 1] += weight * __uint_as_float(words[i] & 0xFFFF0000);
  }
}

// Adds load(0), load(1), … load(count - 1), each with its weight, in this order; several loads are
// in flight.
template <typename Load>
__device__ void add_results(float (&sum)[8], const float* weights, int count, const Load& load) {
  constexpr int kAtOnce = 8;
  for (int first = 0; first < count; first += kAtOnce) {
    uint4 values[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i < count) values[i] = load(first + i);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i < count) add_scaled(sum, values[i], weights[first + i]);
    }
  }
}

// Eights `at` of out, in fp32 or rounded to bf16.
template <bool kF32>
__device__ void store_sum(const float (&sum)[8], void* out, int64_t at) {
  if constexpr (kF32) {
    float4* const to = static_cast<float4*>(out) + at * 2;
    to[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    to[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
  } else {
    static_cast<uint4*>(out)[at] = make_uint4(pack_bf16(sum[0], sum[1]), pack_bf16(sum[2], sum[3]),
                                              pack_bf16(sum[4], sum[5]), pack_bf16(sum[6], sum[7]));
  }
}

}  // namespace fathom::cuda
