// A row of the indexer, a key or one head of a query, in the registers of a warp: lane l has the
// values 4 l to 4 l + 3 of 128.
//
// The order of arithmetic is that of the CPU's portable code (index_keys_cpu.cc, hadamard.h), each
// operation rounded by itself, so that both give the same bits.
#pragma once

#include <cstdint>

#include "device/cuda/fp8.cuh"
#include "device/cuda/rows.cuh"
#include "ops/indexer/index_pages_cuda.h"

namespace fathom::cuda {

struct IndexRow {
  float v[4];
};

// Four bf16 values from an address aligned to 8 bytes.
__device__ inline IndexRow load_index_row(const __nv_bfloat16* row, int lane) {
  const uint2 packed = reinterpret_cast<const uint2*>(row)[lane];
  return {{low_bf16(packed.x), high_bf16(packed.x), low_bf16(packed.y), high_bf16(packed.y)}};
}

// The sum of 128 values: 16 chains of every sixteenth value, then pairs of chains.
__device__ inline float index_sum(const IndexRow& x, int lane) {
  float chain[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    chain[c] = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      chain[c] = __fadd_rn(chain[c], __shfl_sync(~0u, x.v[c], lane % 4 + 4 * i));
    }
  }
#pragma unroll
  for (int distance = 2; distance > 0; distance /= 2) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      chain[c] = __fadd_rn(chain[c], __shfl_xor_sync(~0u, chain[c], distance));
    }
  }
  return __fadd_rn(__fadd_rn(chain[0], chain[2]), __fadd_rn(chain[1], chain[3]));
}

// (x - mean) / sqrt(variance + eps) * weight + bias
__device__ inline void layer_norm(IndexRow& x, const float4& weight, const float4& bias, float eps,
                                  int lane) {
  const float mean = __fdiv_rn(index_sum(x, lane), static_cast<float>(kIndexDim));
  IndexRow squares;
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    x.v[c] = __fsub_rn(x.v[c], mean);
    squares.v[c] = __fmul_rn(x.v[c], x.v[c]);
  }
  const float variance = __fdiv_rn(index_sum(squares, lane), static_cast<float>(kIndexDim));
  const float scale = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(variance, eps)));
  const float weights[4] = {weight.x, weight.y, weight.z, weight.w};
  const float biases[4] = {bias.x, bias.y, bias.z, bias.w};
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    x.v[c] = __fadd_rn(__fmul_rn(__fmul_rn(x.v[c], scale), weights[c]), biases[c]);
  }
}

// Which values are a pair: (i, i + 32), or adjacent ones.
enum class IndexPairs { kHalves, kAdjacent };

// Rotates the first 64 values. cos_sin [32, 2] of the row's position.
template <IndexPairs kPairs>
__device__ inline void rotate(IndexRow& x, const float* cos_sin, int lane) {
  if constexpr (kPairs == IndexPairs::kAdjacent) {
    if (lane >= kIndexRope / 4) return;
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      const float cos = cos_sin[4 * lane + 2 * p], sin = cos_sin[4 * lane + 2 * p + 1];
      const float a = x.v[2 * p], b = x.v[2 * p + 1];
      x.v[2 * p] = __fsub_rn(__fmul_rn(a, cos), __fmul_rn(b, sin));
      x.v[2 * p + 1] = __fadd_rn(__fmul_rn(a, sin), __fmul_rn(b, cos));
    }
  } else {
    constexpr int kHalfLanes = kIndexRope / 8;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float other = __shfl_xor_sync(~0u, x.v[c], kHalfLanes);
      if (lane >= 2 * kHalfLanes) continue;
      const int pair = lane % kHalfLanes * 4 + c;
      const float cos = cos_sin[2 * pair], sin = cos_sin[2 * pair + 1];
      x.v[c] = lane < kHalfLanes ? __fsub_rn(__fmul_rn(x.v[c], cos), __fmul_rn(other, sin))
                                 : __fadd_rn(__fmul_rn(other, sin), __fmul_rn(x.v[c], cos));
    }
  }
}

// The Walsh-Hadamard transform in natural order, times `factor` = 128^-1/2.
__device__ inline void hadamard(IndexRow& x, float factor, int lane) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if ((c & step) != 0) continue;
      const float a = x.v[c], b = x.v[c + step];
      x.v[c] = __fadd_rn(a, b);
      x.v[c + step] = __fsub_rn(a, b);
    }
  }
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float other = __shfl_xor_sync(~0u, x.v[c], step);
      x.v[c] = (lane & step) != 0 ? __fsub_rn(other, x.v[c]) : __fadd_rn(x.v[c], other);
    }
  }
#pragma unroll
  for (int c = 0; c < 4; ++c) x.v[c] = __fmul_rn(x.v[c], factor);
}

// index_scale() (cache/index_key_row.h).
__device__ inline float index_scale_of(float amax) {
  constexpr float kE4M3Max = 448, kAmaxFloor = 1e-4f;
  if (__float_as_uint(amax) >= 0x7F800000) return __uint_as_float(0x7FC00000);
  const uint32_t bits = __float_as_uint(__fdiv_rn(fmaxf(amax, kAmaxFloor), kE4M3Max));
  return __uint_as_float(((bits >> 23) + ((bits & 0x7FFFFF) != 0 ? 1 : 0)) << 23);
}

// The lane's four codes, the lowest first; `scale` is the row's in all lanes.
__device__ inline uint32_t quantize_index_row(const IndexRow& x, float* scale) {
  uint32_t amax = 0;  // magnitudes compare as integers, and NaN above all of them
#pragma unroll
  for (int c = 0; c < 4; ++c) amax = max(amax, __float_as_uint(x.v[c]) & 0x7FFFFFFF);
  amax = __reduce_max_sync(~0u, amax);
  *scale = index_scale_of(__uint_as_float(amax));
  const float inverse = __fdiv_rn(1.0f, *scale);  // a power of two: exact
  return pack_fp8<Fp8::kE4M3>(x.v[0] * inverse, x.v[1] * inverse, x.v[2] * inverse,
                              x.v[3] * inverse);
}

}  // namespace fathom::cuda
