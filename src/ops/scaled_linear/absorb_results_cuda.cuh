// Arguments and epilogue of the absorption GEMMs (scaled_absorb_cuda.cu): 256 threads, eight warps
// of 16 rows of weights each, transpose results of [128 rows of weights, tokens] into rows of
// tokens in shared memory and write them.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "device/cuda/ptx.cuh"
#include "device/cuda/rows.cuh"
#include "ops/scaled_linear/quantize_block_cuda.cuh"
#include "ops/scaled_linear/scaled_absorb_cuda.h"

namespace fathom::cuda {

inline constexpr int kAbsorbThreads = 256;  // two warpgroups of 64 rows of weights
inline constexpr int kAbsorbSide = 128;     // side of a block of weights
inline constexpr int kAbsorbBlocks = 4;     // blocks of a head's weights

struct AbsorbArguments {
  const __nv_bfloat16* x;
  int64_t x_row_stride, x_head_stride;
  const float* weight_scales;
  __nv_bfloat16* out;
  int64_t out_row_stride, out_head_stride;
  QuantizedRows quantized;
  int32_t rows, n_parts, row_parts;
};

inline AbsorbArguments absorb_arguments(const ScaledAbsorbPlan& plan,
                                        const ScaledAbsorbArguments& a) {
  return {.x = static_cast<const __nv_bfloat16*>(a.x),
          .x_row_stride = a.x_row_stride,
          .x_head_stride = a.x_head_stride,
          .weight_scales = a.weight_scales,
          .out = static_cast<__nv_bfloat16*>(a.out),
          .out_row_stride = a.out_row_stride,
          .out_head_stride = a.out_head_stride,
          .quantized = a.quantized,
          .rows = a.rows,
          .n_parts = plan.n_parts,
          .row_parts = plan.row_parts};
}

// Loads the scales of a head's weights, before the PDL wait.
__device__ inline float4 load_absorb_scales(const float* weight_scales, int head) {
  const uint4 v = load_weights_16(weight_scales + head * kAbsorbBlocks);
  return {__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)};
}
__device__ inline float absorb_scale(float4 scales, int block) {
  return block < 2 ? (block == 0 ? scales.x : scales.y) : (block == 2 ? scales.z : scales.w);
}

template <int kTokens>
inline constexpr int kAbsorbResultBytes = kTokens* kAbsorbSide * 2;

// Stages 128 columns of results as rows of tokens at `results`, in bf16: two boxes of 64 columns,
// with the 128-byte swizzle. The caller synchronises all 256 threads between this and
// write_absorbed().
template <int kTokens>
__device__ inline void stage_absorbed(const float (&sums)[kTokens / 2], uint8_t* results) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int column = static_cast<int>(threadIdx.x) / kWarp * 2 + lane / 8 % 2;  // one of 8 columns
  const uint32_t to = shared_address(results) + column / 8 * (kTokens * 128);
#pragma unroll
  for (int g = 0; g < kTokens / 8; g += 2) {
    constexpr int kLast = kTokens / 8 - 1;  // a tile of 8 tokens is written twice
    const int next = g < kLast ? g + 1 : g;
    const int token = (lane / 16 == 0 ? g : next) * 8 + lane % 8;
    store_matrices_transposed(to + token * 128 + ((column % 8) ^ (token % 8)) * 16,
                              pack_bf16(sums[4 * g], sums[4 * g + 1]),
                              pack_bf16(sums[4 * g + 2], sums[4 * g + 3]),
                              pack_bf16(sums[4 * next], sums[4 * next + 1]),
                              pack_bf16(sums[4 * next + 2], sums[4 * next + 3]));
  }
}

// Writes the tile's rows from first_row on, columns from `column` on of the head's results.
// kQuantizes: the columns are all of the head's, and e4m3 may be requested. Sixteen lanes write a
// row; with several rows each lane computes one row's scale.
template <int kTokens, bool kQuantizes>
__device__ inline void write_absorbed(const AbsorbArguments& a, const uint8_t* results,
                                      int first_row, int head, int column) {
  constexpr int kTogether = kAbsorbThreads / kBlockLanes;
  constexpr int kEach = (kTokens + kTogether - 1) / kTogether;
  const int lane = static_cast<int>(threadIdx.x) % kBlockLanes;
  const int first = static_cast<int>(threadIdx.x) / kBlockLanes;
  uint4 v[kEach];
  bool exists[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int token = first + i * kTogether, row = first_row + token;
    exists[i] = token < kTokens && row < a.rows;
    v[i] = *reinterpret_cast<const uint4*>(results + lane / 8 * (kTokens * 128) +
                                           token % kTokens * 128 + ((lane % 8) ^ (token % 8)) * 16);
    if (a.out != nullptr && exists[i]) {
      *reinterpret_cast<uint4*>(a.out + row * a.out_row_stride + head * a.out_head_stride + column +
                                lane * 8) = v[i];
    }
  }
  if constexpr (kQuantizes) {
    const QuantizedRows& to = a.quantized;
    if (to.values == nullptr) return;
    float magnitude = 1;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const float of_row = block_magnitude(v[i]);
      if (lane % kEach == i) magnitude = of_row;
    }
    const BlockScale scale = block_scale(magnitude, to.form, to.fixed_scale);
    const int64_t first_value = head * kAbsorbSide + lane * 8;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const float inverse = __shfl_sync(~0u, scale.inverse, i, kBlockLanes);
      if (!exists[i]) continue;
      const int64_t row = first_row + first + i * kTogether;
      *reinterpret_cast<uint2*>(static_cast<uint8_t*>(to.values) + row * to.values_row_stride +
                                first_value) = pack_e4m3(v[i], inverse);
      if (lane == i) to.scales[head * to.scales_block_stride + row] = scale.scale;
    }
  }
}

}  // namespace fathom::cuda
