// A part's queries in f16, brought into shared memory, and what 8 bits become on their way to the
// tensor cores: for latent_decode_8_bit_rows_cuda.cu.
#pragma once

#include "cache/latent_row_cuda.cuh"
#include "device/cuda/fp8.cuh"
#include "device/cuda/rows.cuh"
#include "ops/attention/latent_decode_8_bit_queries_cuda.cuh"
#include "ops/attention/latent_decode_8_bit_rows_memory_cuda.cuh"

namespace fathom::cuda::latent_8_bit {

// Queries are brought below 2^15, which f16 holds: nothing of a value in bf16 is lost down to 2^-32
// of the block's largest.
constexpr int kF16QueryExponent = 14;

// Scales are multiplied with this, which brings those of small rows into the range where f16 has
// all of its bits; larger ones than kMostScale are taken for that.
constexpr float kScaleUp = 16, kMostScale = 9;
__device__ inline uint32_t times_f16(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// 16 values in f16 in the order in which keys' columns come to the tensor cores: of four
// neighbouring columns the first two in the first half, the others in the second.
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

// The block's rows of a part, from `first` on, `rows` of them (at least one), times a power of two;
// of their products with keys the factor that makes logarithms of base 2 of them. A row's columns
// are 36 units of 16, four threads'.
template <typename Row>
__device__ inline float load_queries(RowsSharedMemory<Row>& shared, const Arguments& arguments,
                                     int64_t first, int rows) {
  using Shared = RowsSharedMemory<Row>;
  constexpr int kSharers = kComputing / kBlockRows, kUnits = (kLatent + kRope) / 16;
  constexpr int kUnitsEach = kUnits / kSharers;
  wait_for_earlier_launches();
  meet();  // the part before has been computed
  const int row = threadIdx.x / kSharers, sharer = threadIdx.x % kSharers;
  // Rows beyond the part's compute its first one again; nobody reads what they give.
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
  const float up = scale_up<kF16QueryExponent>(shared, values);
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
  if (threadIdx.x < kBlockRows) shared.references[threadIdx.x] = -INFINITY;
  fence_async_proxy();
  meet();
  return arguments.scale_log2 / (Row::kIsScaled ? up * kScaleUp : up);
}

}  // namespace fathom::cuda::latent_8_bit
