// Shared by the kernels that multiply a single row x by e4m3 with block-wise scales (GEMV): x as
// f16 in shared memory, and a warp's multiply-adds with two rows of weights (or two runs of short
// ones) that lie in shared memory, a half of a slot each.
//
// e4m3 is converted to f16, which holds it exactly, before the tensor cores, two values an
// instruction, and products are summed in fp32. A warp reads 512 bytes of each half, 16 a lane, and
// multiplies them as a matrix of 16 rows: row g is bytes 64 g to 64 g + 63 of the first half, row g
// + 8 those of the second, and column g the same bytes' part of x. So the diagonal has the sums of
// 64 products each, all of one block that has a scale; nothing is read twice and no transposition
// is needed.
//
// x itself is e4m3, or any values times a power of two for each 128 columns (f16_scale), which
// loses only what f16's eleven bits lose.
#pragma once

#include <cstdint>

#include "device/cuda/fp8.cuh"
#include "device/cuda/rows.cuh"
#include "device/cuda/warp_mma.cuh"

namespace fathom::cuda {

inline constexpr int kStepBytes = kWarp * 16;  // of each half, per step

// ---- vectors of f16 in shared memory, rounded up to 512: in each 512 first eight of each sixteen,
// then the others, so that lanes read sixteen neighbours each without bank conflicts.

__device__ inline unsigned vector_at(unsigned i) {  // byte offset of the eight that contain i
  return i / 512 * 1024 + i / 8 % 2 * 512 + i % 512 / 16 * 16;
}

struct Sixteen {
  uint4 low, high;
};

__device__ inline Sixteen load_sixteen(const uint8_t* vector, unsigned first) {
  const auto* at = reinterpret_cast<const uint4*>(vector + vector_at(first));
  return {at[0], at[512 / 16]};
}

// ---- f16 with a scale for each 128 columns

// Powers of two: `scale` undoes the multiplication by `inverse`.
struct F16Scale {
  float scale, inverse;
};

// The scale that brings the largest magnitude of 128 to between 2^14 and 2^15; values down to 2^-28
// of it keep their eleven bits.
__device__ inline F16Scale f16_scale(float magnitude) {
  constexpr int kBias = 127, kTarget = 14, kLeast = 16;  // exponents
  const int exponent = max(static_cast<int>(__float_as_uint(magnitude) >> 23), kLeast) - kTarget;
  return {__uint_as_float(static_cast<uint32_t>(exponent) << 23),
          __uint_as_float(static_cast<uint32_t>(2 * kBias - exponent) << 23)};
}

// ---- multiply-adds

struct Pair {
  float first, second;
};

// Multiplies 512 bytes of each half, 16 of a lane: the sums of 64 products each, in the lanes on
// the diagonal. The second half is kHalfBytes after the first.
template <int kHalfBytes>
__device__ Pair multiply_step(const uint8_t* weights, const Sixteen& x, int lane) {
  const uint4 w[2] = {*reinterpret_cast<const uint4*>(weights),
                      *reinterpret_cast<const uint4*>(weights + kHalfBytes)};
  const auto a_of = [](uint32_t first, uint32_t second, uint32_t(&a)[4]) {
    a[0] = fp8_to_f16<Fp8::kE4M3>(first);
    a[1] = fp8_to_f16<Fp8::kE4M3>(second);
    a[2] = upper_fp8_to_f16<Fp8::kE4M3>(first);
    a[3] = upper_fp8_to_f16<Fp8::kE4M3>(second);
  };
  float d[2][4];
  uint32_t a[4];
  a_of(w[0].x, w[1].x, a);
  warp_first_mma_16x8x16_f16(d[0], a, {x.low.x, x.low.y});
  a_of(w[0].y, w[1].y, a);
  warp_first_mma_16x8x16_f16(d[1], a, {x.low.z, x.low.w});
  a_of(w[0].z, w[1].z, a);
  warp_mma_16x8x16_f16(d[0], a, {x.high.x, x.high.y});
  a_of(w[0].w, w[1].w, a);
  warp_mma_16x8x16_f16(d[1], a, {x.high.z, x.high.w});
  const bool odd = (lane & 4) != 0;
  return {odd ? d[0][1] + d[1][1] : d[0][0] + d[1][0], odd ? d[0][3] + d[1][3] : d[0][2] + d[1][2]};
}

// Whether the lane holds the column of its matrix row, g.
__device__ inline bool is_on_diagonal(int lane) { return lane % 4 == lane / 8; }

// Multiplies `columns` of one row of each half, a multiple of 128, with the vector's from `first`
// on: returns the first half's and the second's sums, in every lane. The scales are those from the
// first column on.
template <int kHalfBytes>
__device__ Pair multiply_rows(const uint8_t* weights, const uint8_t* vector, int first, int columns,
                              const float* x_scales, const float* scales0, const float* scales1,
                              int lane) {
  Pair sums = {0, 0};
  const unsigned chunk = static_cast<unsigned>(lane) / 4 * 64;
  const bool diagonal = is_on_diagonal(lane);
#pragma unroll 2
  for (unsigned at = 0; at < static_cast<unsigned>(columns); at += kStepBytes) {
    const Pair more = multiply_step<kHalfBytes>(weights + at + lane * 16,
                                                load_sixteen(vector, first + at + lane * 16), lane);
    const unsigned column = at + chunk, block = column / 128;
    if (diagonal && column < static_cast<unsigned>(columns)) {
      const float x_scale = x_scales[block];
      sums.first = fmaf(more.first, x_scale * scales0[block], sums.first);
      sums.second = fmaf(more.second, x_scale * scales1[block], sums.second);
    }
  }
  return {warp_sum(sums.first), warp_sum(sums.second)};
}

// Multiplies rows0 rows of the first half and rows1 of the second, of 128 or 256 columns, dense: a
// step covers several rows and always the same part of the vector. scale(second, row) is x's scale
// times the weights', of the lane's block of 128 columns, (lane / 4 * 64 % columns) / 128.
// store(second, row, sum) is called by one lane for each row.
template <int kHalfBytes, typename Scale, typename Store>
__device__ void multiply_short_rows(const uint8_t* weights, int columns, int rows0, int rows1,
                                    const Sixteen& x, int lane, const Scale& scale,
                                    const Store& store) {
  const int diagonal = lane / 4 * 4 + lane / 8;  // the lane that holds the sum of this lane's row
  const bool is_first = lane * 16 % columns == 0;
  const int rows_together = kStepBytes / columns;
  int row = lane / 4 * 64 / columns;
#pragma unroll 2
  for (int at = 0; at < rows0 * columns; at += kStepBytes, row += rows_together) {
    const Pair more = multiply_step<kHalfBytes>(weights + at + lane * 16, x, lane);
    float first = __shfl_sync(~0u, more.first, diagonal) * scale(false, row);
    float second = __shfl_sync(~0u, more.second, diagonal) * scale(true, row);
    first += __shfl_xor_sync(~0u, first, 4);
    second += __shfl_xor_sync(~0u, second, 4);
    if (columns == 256) {
      first += __shfl_xor_sync(~0u, first, 8);
      second += __shfl_xor_sync(~0u, second, 8);
    }
    if (is_first && row < rows0) store(false, row, first);
    if (is_first && row < rows1) store(true, row, second);
  }
}

}  // namespace fathom::cuda
