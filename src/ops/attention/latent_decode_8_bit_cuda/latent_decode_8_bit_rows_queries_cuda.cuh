// Loads a split's queries as f16 into shared memory and upconverts 8-bit keys for the tensor cores,
// for latent_decode_8_bit_rows_cuda.cu.
#pragma once

#include "cache/latent_row_cuda.cuh"
#include "device/cuda/fp8.cuh"
#include "device/cuda/rows.cuh"
#include "ops/attention/latent_decode_8_bit_cuda/latent_decode_8_bit_queries_cuda.cuh"
#include "ops/attention/latent_decode_8_bit_cuda/latent_decode_8_bit_rows_memory_cuda.cuh"
#include "ops/attention/latent_decode_cuda/score_reference_cuda.cuh"

namespace fathom::cuda::latent_8_bit {

// Queries are scaled below 2^15, which f16 holds: a bf16 value loses nothing down to 2^-32 of the
// CTA's largest.
constexpr int kF16QueryExponent = 14;

// Scales are multiplied with kScaleUp, which brings those of small rows into f16's full-precision
// range. Up to kMostScale the largest e4m3 value times its scale is below f16's limit; larger
// scales are first divided by scale_divisor() of the largest.
constexpr float kScaleUp = 16, kMostScale = 9;

// The power of two that brings `largest`, which is above kMostScale, below 8.
__device__ inline float scale_divisor(float largest) {
  return __uint_as_float((__float_as_uint(largest) & 0x7F800000) - (2u << 23));
}

__device__ inline uint32_t times_bf16(uint32_t a, float power_of_two) {
  const uint32_t b = pack_bf16(power_of_two, power_of_two);
  uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}
__device__ inline uint32_t times_f16(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// Stores 16 f16 values in the order in which keys' columns reach the tensor cores: of four adjacent
// columns the first two in the first half, the others in the second.
__device__ inline void store_unit(uint8_t* box, int row, int unit, const Eight& low,
                                  const Eight& high) {
  uint32_t pairs[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    pairs[i] = pack_f16(low.v[2 * i], low.v[2 * i + 1]);
    pairs[i + 4] = pack_f16(high.v[2 * i], high.v[2 * i + 1]);
  }
  *reinterpret_cast<uint4*>(box + chunk_at(row, 2 * unit)) =
      make_uint4(pairs[0], pairs[2], pairs[4], pairs[6]);
  *reinterpret_cast<uint4*>(box + chunk_at(row, 2 * unit + 1)) =
      make_uint4(pairs[1], pairs[3], pairs[5], pairs[7]);
}

// Loads the CTA's `rows` rows (at least one) of a split, from `first` on, times a power of two;
// returns the factor from query-key dot products to base 2 logarithms. A row's columns are 36 units
// of 16, divided among four threads.
template <typename Row, typename Shared>
__device__ inline float load_queries(Shared& shared, const Arguments& arguments, int64_t first,
                                     int rows) {
  constexpr int kSharers = kComputing / kBlockRows, kUnits = (kLatent + kRope) / 16;
  constexpr int kUnitsEach = kUnits / kSharers;
  wait_for_earlier_launches();
  meet();  // the previous split is done
  const int row = threadIdx.x / kSharers, sharer = threadIdx.x % kSharers;
  // Rows beyond the split's repeat its first one; their results are discarded.
  const int64_t from = first + (row < rows ? row : 0);
  uint4 values[kUnitsEach][2];
#pragma unroll
  for (int u = 0; u < kUnitsEach; ++u) {
    const int unit = sharer + u * kSharers;
    const __nv_bfloat16* source = unit < kLatent / 16
                                      ? arguments.q_latent + from * kLatent + unit * 16
                                      : arguments.q_rope + from * kRope + (unit * 16 - kLatent);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      values[u][half] = reinterpret_cast<const uint4*>(source)[half];
    }
  }
  const float up = scale_up<kF16QueryExponent>(shared, arguments, values);
#pragma unroll
  for (int u = 0; u < kUnitsEach; ++u) {
    const int unit = sharer + u * kSharers, box = unit / 4;
    const Eight low = times(widen(values[u][0]), up), high = times(widen(values[u][1]), up);
    if (Row::kRopeIsBf16 && box == Shared::kRopeBox) {
      uint8_t* const to = shared.queries[box];
      *reinterpret_cast<uint4*>(to + chunk_at(row, unit % 4 * 2)) = narrow(times(low, kScaleUp));
      *reinterpret_cast<uint4*>(to + chunk_at(row, unit % 4 * 2 + 1)) =
          narrow(times(high, kScaleUp));
    } else {
      store_unit(shared.queries[box], row, unit % 4, low, high);
    }
  }
  if (threadIdx.x < kBlockRows) shared.references[threadIdx.x] = kNoReference;
  if (threadIdx.x < kGroups) shared.value_divisors[threadIdx.x] = 1;
  fence_async_proxy();
  meet();
  return arguments.scale_log2 / (Row::kIsScaled ? up * kScaleUp : up);
}

}  // namespace fathom::cuda::latent_8_bit
