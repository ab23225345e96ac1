// Splits queries and probabilities into sums of e4m3 values and loads a split's queries into shared
// memory, for latent_decode_8_bit_cuda.cu.
#pragma once

#include "cache/latent_row_cuda.cuh"
#include "device/cuda/ptx.cuh"
#include "device/cuda/rows.cuh"
#include "ops/attention/latent_decode_8_bit_cuda/latent_decode_8_bit_memory_cuda.cuh"

namespace fathom::cuda::latent_8_bit {

__device__ inline Eight times(Eight x, float factor) {
#pragma unroll
  for (float& v : x.v) v *= factor;
  return x;
}

// Removes from x the leading bits that one e4m3 value holds and returns them; the last term is
// rounded.
__device__ inline float take_term(float& x, int term) {
  if (term == kTerms - 1) return x;
  const float leading = __uint_as_float(__float_as_uint(x) & 0xFFF00000);
  x -= leading;
  return leading;
}
__device__ inline uint2 next_term(Eight& x, int term) {
  Eight leading;
#pragma unroll
  for (int i = 0; i < 8; ++i) leading.v[i] = take_term(x.v[i], term);
  return narrow_to_fp8<Fp8::kE4M3>(leading);
}

// Values of 0, and below 2^-63, are brought up no further: where the way back is 0, a masked score
// times it is NaN.
constexpr int kLeastExponent = 64;

// The power of two that brings the CTA's largest value below 2^(kExponent + 1). One factor serves
// all rows: the absolute error of scores matters.
template <int kExponent, typename Shared, int kUnitsEach>
__device__ inline float scale_up(Shared& shared, const Arguments& arguments,
                                 const uint4 (&values)[kUnitsEach][2]) {
  uint32_t most = 0;  // largest magnitude's bits
#pragma unroll
  for (int u = 0; u < kUnitsEach; ++u) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 v = values[u][half];
      most = __vmaxu2(__vmaxu2(most, v.x & 0x7FFF7FFF), v.y & 0x7FFF7FFF);
      most = __vmaxu2(__vmaxu2(most, v.z & 0x7FFF7FFF), v.w & 0x7FFF7FFF);
    }
  }
  most = __reduce_max_sync(~0u, max(most >> 16, most & 0xFFFF));
  if (threadIdx.x % 32 == 0) shared.largest_queries[threadIdx.x / 32] = most;
  meet();
#pragma unroll
  for (int w = 0; w < kWarps; ++w) most = max(most, shared.largest_queries[w]);
  const int least = FATHOM_PLANTED(arguments, kUnboundedQueries) ? 15 : kLeastExponent;
  const int exponent = max(least, static_cast<int>(most) >> 7);
  return __int_as_float((2 * 127 + kExponent - exponent) << 23);
}

// Loads a split's rows as sums of terms times a power of two; returns the factor from query-key dot
// products to base 2 logarithms. A row's columns are 36 units of 16, divided among several threads.
template <typename Row, int kRows>
__device__ inline float load_queries(SharedMemory<Row, kRows>& shared, const Arguments& arguments,
                                     const LatentDecodePart& part) {
  using Shared = SharedMemory<Row, kRows>;
  constexpr int kSharers = kComputing / kRows, kUnits = (kLatent + kRope) / 16;
  constexpr int kUnitsEach = (kUnits + kSharers - 1) / kSharers;
  wait_for_earlier_launches();
  meet();  // the previous split is done
  const int row = threadIdx.x / kSharers, first = threadIdx.x % kSharers;
  // Rows beyond the split's repeat its first one; their results are discarded.
  const int64_t from = part.out_row + (row < part.rows ? row : 0);
  uint4 values[kUnitsEach][2];
#pragma unroll
  for (int u = 0; u < kUnitsEach; ++u) {
    const int unit = first + u * kSharers;
    const __nv_bfloat16* source = unit < kLatent / 16
                                      ? arguments.q_latent + from * kLatent + unit * 16
                                      : arguments.q_rope + from * kRope + (unit * 16 - kLatent);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      values[u][half] =
          unit < kUnits ? reinterpret_cast<const uint4*>(source)[half] : make_uint4(0, 0, 0, 0);
    }
  }
  const float up = scale_up<kQueryExponent>(shared, arguments, values);
#pragma unroll
  for (int u = 0; u < kUnitsEach; ++u) {
    const int unit = first + u * kSharers;
    if (unit >= kUnits) break;
    Eight low = times(widen(values[u][0]), up), high = times(widen(values[u][1]), up);
    const bool is_rope = unit >= kLatent / 16;
    const int rope_unit = unit - kLatent / 16;
    if (Row::kRopeIsBf16 && is_rope) {
      uint8_t* const box = shared.queries[Shared::kRopeBox];
      *reinterpret_cast<uint4*>(box + chunk_at(row, 2 * rope_unit)) = narrow(low);
      *reinterpret_cast<uint4*>(box + chunk_at(row, 2 * rope_unit + 1)) = narrow(high);
      continue;
    }
#pragma unroll
    for (int term = 0; term < kTerms; ++term) {
      const uint2 a = next_term(low, term), b = next_term(high, term);
      const int box = is_rope ? Shared::kRopeBox : term * kSlabs + unit / 8;
      const int chunk = is_rope ? term * (kRope / 16) + rope_unit : unit % 8;
      *reinterpret_cast<uint4*>(shared.queries[box] + chunk_at(row, chunk)) =
          make_uint4(a.x, a.y, b.x, b.y);
    }
  }
  fence_async_proxy();
  meet();
  return arguments.scale_log2 / up;
}

}  // namespace fathom::cuda::latent_8_bit
