// Shared by row operations on activations: eight neighbouring values of a row (16 bytes of bf16),
// and sums over a warp or a CTA in one fixed order.
//
// Loads are ordinary ones: with overlapping launches, results of an earlier launch must not be read
// through the read-only path.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "device/cuda/ptx.cuh"

namespace fathom::cuda {

inline constexpr int kWarp = 32;

__device__ inline float low_bf16(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ inline float high_bf16(uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000); }

struct Eight {
  float v[8];
};

__device__ inline Eight widen(uint4 packed) {
  return {{low_bf16(packed.x), high_bf16(packed.x), low_bf16(packed.y), high_bf16(packed.y),
           low_bf16(packed.z), high_bf16(packed.z), low_bf16(packed.w), high_bf16(packed.w)}};
}
__device__ inline uint4 narrow(const Eight& x) {
  return make_uint4(pack_bf16(x.v[0], x.v[1]), pack_bf16(x.v[2], x.v[3]), pack_bf16(x.v[4], x.v[5]),
                    pack_bf16(x.v[6], x.v[7]));
}

// Aligned to 16 bytes.
__device__ inline Eight load_eight(const __nv_bfloat16* from) {
  return widen(*reinterpret_cast<const uint4*>(from));
}
__device__ inline Eight load_eight(const float* from) {
  const float4 low = reinterpret_cast<const float4*>(from)[0];
  const float4 high = reinterpret_cast<const float4*>(from)[1];
  return {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
}
__device__ inline void store_eight(const Eight& x, __nv_bfloat16* to) {
  *reinterpret_cast<uint4*>(to) = narrow(x);
}
__device__ inline void store_eight(const Eight& x, float* to) {
  reinterpret_cast<float4*>(to)[0] = make_float4(x.v[0], x.v[1], x.v[2], x.v[3]);
  reinterpret_cast<float4*>(to)[1] = make_float4(x.v[4], x.v[5], x.v[6], x.v[7]);
}

// Loads sixteen bytes of weights, which no launch writes, at this place in program order, before
// the PDL wait if it stands before it. A load through the read-only path (__ldg, ld.global.nc) is
// not: ptxas 13.0 moves it after the wait.
__device__ inline uint4 load_weights_16(const void* from) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}
__device__ inline Eight load_eight_weights(const float* from) {
  const uint4 low = load_weights_16(from), high = load_weights_16(from + 4);
  return {{__uint_as_float(low.x), __uint_as_float(low.y), __uint_as_float(low.z),
           __uint_as_float(low.w), __uint_as_float(high.x), __uint_as_float(high.y),
           __uint_as_float(high.z), __uint_as_float(high.w)}};
}

__device__ inline float sum_of_squares(const Eight& x) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum += x.v[i] * x.v[i];
  return sum;
}

// The sum over the warp, in all its lanes.
__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(~0u, x, distance);
  }
  return x;
}

// ---- norms of rows: a CTA of at most kRowThreads; thread t has eights t, t + kRowThreads, … All
// kernels that norm a row share this order, so their results are bitwise identical.

inline constexpr int kRowThreads = 256, kRowWarps = kRowThreads / kWarp;

// Adds one sum a warp, 0 for absent warps.
__device__ inline float sum_of_warps(const float* parts) {
  const float4 a = reinterpret_cast<const float4*>(parts)[0];
  const float4 b = reinterpret_cast<const float4*>(parts)[1];
  return ((a.x + b.x) + (a.z + b.z)) + ((a.y + b.y) + (a.w + b.w));
}

// The same for a CTA of kThreads, with more warps than those in another fixed order.
template <int kThreads>
__device__ float sum_of_block(const float* parts) {
  if constexpr (kThreads == kRowThreads) return sum_of_warps(parts);
  return warp_sum(parts[threadIdx.x % kWarp]);
}

// The factor that makes a row's mean square 1.
__device__ inline float inverse_rms(float sum_of_squares, int n, float eps) {
  return 1.0f / sqrtf(sum_of_squares / static_cast<float>(n) + eps);
}

__device__ inline Eight normed(const Eight& x, const Eight& weight, float inverse_rms) {
  Eight y;
#pragma unroll
  for (int i = 0; i < 8; ++i) y.v[i] = weight.v[i] * (x.v[i] * inverse_rms);
  return y;
}

}  // namespace fathom::cuda
