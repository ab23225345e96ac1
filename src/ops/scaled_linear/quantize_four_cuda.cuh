// quantize_block() (quantize_rows.h) of what a whole warp holds in registers, in fp32.
#pragma once

#include "ops/scaled_linear/quantize_block_cuda.cuh"

namespace fathom::cuda {

struct QuantizedFour {
  uint32_t values;  // e4m3, the first in the lowest byte
  float scale;
};

// A block of 128, four of it in each lane.
__device__ inline QuantizedFour quantize_four(float4 x, ScaleForm form) {
  float magnitude = fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w)));
  magnitude = fmaxf(magnitude, kLeastMagnitude);
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    magnitude = fmaxf(magnitude, __shfl_xor_sync(~0u, magnitude, distance));
  }
  const BlockScale s = block_scale(magnitude, form);
  return {pack_fp8<Fp8::kE4M3>(x.x * s.inverse, x.y * s.inverse, x.z * s.inverse, x.w * s.inverse),
          s.scale};
}

}  // namespace fathom::cuda
