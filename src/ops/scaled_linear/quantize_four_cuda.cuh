// quantize_block() (quantize_rows.h) for values that a whole warp holds in registers, in fp32.
#pragma once

#include "ops/scaled_linear/quantize_block_cuda.cuh"

namespace fathom::cuda {

// The largest magnitude of a block of 128, four values in each lane; returned in all lanes.
__device__ inline float warp_magnitude(float4 x) {
  float magnitude = fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w)));
  magnitude = fmaxf(magnitude, kLeastMagnitude);
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    magnitude = fmaxf(magnitude, __shfl_xor_sync(~0u, magnitude, distance));
  }
  return magnitude;
}

// Packs four e4m3 values, the first in the lowest byte.
__device__ inline uint32_t pack_four(float4 x, float inverse) {
  return pack_fp8<Fp8::kE4M3>(x.x * inverse, x.y * inverse, x.z * inverse, x.w * inverse);
}

}  // namespace fathom::cuda
