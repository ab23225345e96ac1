// quantize_block() (quantize_rows.h) for kernels that hold a row in registers: sixteen lanes, an
// aligned half of a warp, hold eight neighbouring values each of a block of 128.
//
// Determinism: bitwise identical to quantize_block(): all divisions are IEEE's.
#pragma once

#include <cstdint>

#include "device/cuda/fp8.cuh"
#include "device/cuda/rows.cuh"
#include "ops/scaled_linear/quantized_rows_cuda.h"

namespace fathom::cuda {

inline constexpr int kBlockLanes = 16;

// The factor that dequantizes a block's values, and the one that they are multiplied by before
// rounding.
struct BlockScale {
  float scale, inverse;
};

// magnitude: the block's largest, at least kLeastMagnitude. fixed_scale: 0, or the scale to use.
__device__ inline BlockScale block_scale(float magnitude, ScaleForm form, float fixed_scale = 0) {
  if (fixed_scale != 0) return {fixed_scale, __fdiv_rn(1.0f, fixed_scale)};
  BlockScale s = {__fdiv_rn(magnitude, kLargestE4M3), __fdiv_rn(kLargestE4M3, magnitude)};
  if (form == ScaleForm::kPowerOfTwo) {
    constexpr uint32_t kMantissa = 0x7FFFFF;
    s.scale = __uint_as_float((__float_as_uint(s.scale) + kMantissa) & ~kMantissa);
    s.inverse = __fdiv_rn(1.0f, s.scale);
  }
  return s;
}

__device__ inline __nv_bfloat162 magnitudes(uint32_t pair) {
  pair &= 0x7FFF7FFF;
  return *reinterpret_cast<const __nv_bfloat162*>(&pair);
}
__device__ inline __nv_bfloat162 largest_magnitudes(uint4 x) {
  return __hmax2(__hmax2(magnitudes(x.x), magnitudes(x.y)),
                 __hmax2(magnitudes(x.z), magnitudes(x.w)));
}

// The maximum over so many neighbouring lanes, in all of them; all of them must call it together.
template <int kLanes>
__device__ inline float magnitude_among(__nv_bfloat162 most) {
  const uint32_t lanes = ((1u << kLanes) - 1) << (threadIdx.x & (kWarp - kLanes));
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    most = __hmax2(most, __shfl_xor_sync(lanes, most, distance));
  }
  return fmaxf(fmaxf(__low2float(most), __high2float(most)), kLeastMagnitude);
}

// The largest magnitude of eight bf16 values in each of sixteen lanes.
__device__ inline float block_magnitude(uint4 x) {
  return magnitude_among<kBlockLanes>(largest_magnitudes(x));
}
// The largest magnitude of 32 values in each of four lanes.
__device__ inline float magnitude_among_four(const uint4 (&x)[4]) {
  return magnitude_among<4>(__hmax2(__hmax2(largest_magnitudes(x[0]), largest_magnitudes(x[1])),
                                    __hmax2(largest_magnitudes(x[2]), largest_magnitudes(x[3]))));
}

__device__ inline uint2 pack_e4m3(uint4 x, float inverse) {
  const Eight wide = widen(x);
  const auto four = [&](int i) {
    return pack_fp8<Fp8::kE4M3>(wide.v[i] * inverse, wide.v[i + 1] * inverse,
                                wide.v[i + 2] * inverse, wide.v[i + 3] * inverse);
  };
  return {four(0), four(4)};
}

// Stores a lane's eight columns from `column` on, in bf16; all sixteen lanes call it together.
__device__ inline void store_quantized(uint4 x, const QuantizedRows& to, int64_t row, int column) {
  const BlockScale s = block_scale(block_magnitude(x), to.form, to.fixed_scale);
  *reinterpret_cast<uint2*>(static_cast<uint8_t*>(to.values) + row * to.values_row_stride +
                            column) = pack_e4m3(x, s.inverse);
  constexpr int kBlock = static_cast<int>(kScaleBlock);
  if (column % kBlock == 0) to.scales[column / kBlock * to.scales_block_stride + row] = s.scale;
}

}  // namespace fathom::cuda
