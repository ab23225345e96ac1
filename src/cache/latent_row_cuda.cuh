// Rows of the latent cache as kernels read and write them: 512 latent values and 64 rotary ones, in
// the formats of latent_layout.h whose bits latent_row.h defines.
#pragma once

#include <cuda_bf16.h>

#include "base/check.h"
#include "cache/cache_format.h"
#include "device/cuda/fp8.cuh"
#include "device/cuda/rows.cuh"

namespace fathom::cuda {

template <CacheFormat kFormat>
struct LatentRow {
  static constexpr int kLatent = 512, kRope = 64;
  static constexpr bool kIsBf16 = kFormat == CacheFormat::kBF16;
  static constexpr bool kIsScaled = kFormat == CacheFormat::kFp8Scaled;
  static constexpr bool kRopeIsBf16 = kIsBf16 || kIsScaled;
  static constexpr Fp8 kType = kFormat == CacheFormat::kE5M2 ? Fp8::kE5M2 : Fp8::kE4M3;
  static constexpr int kScales = kIsScaled ? kLatent / static_cast<int>(kLatentScaleBlock) : 0;
  static constexpr int kScalesAt = kIsBf16 ? kLatent * 2 : kLatent;  // bytes
  static constexpr int kRopeAt = kScalesAt + kScales * 4;
  static constexpr int kBytes = kRopeAt + kRope * (kRopeIsBf16 ? 2 : 1);
};

// Eight values as 8 bits each.
template <Fp8 kType>
__device__ inline uint2 narrow_to_fp8(const Eight& x) {
  return {pack_fp8<kType>(x.v[0], x.v[1], x.v[2], x.v[3]),
          pack_fp8<kType>(x.v[4], x.v[5], x.v[6], x.v[7])};
}

template <Fp8 kType>
__device__ inline Eight widen_fp8(uint2 bytes) {
  const float4 low = widen_fp8<kType>(bytes.x), high = widen_fp8<kType>(bytes.y);
  return {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
}

// Calls body(LatentRow<format>()): a kernel is compiled for each format that a GPU has.
template <typename Body>
void with_latent_row(CacheFormat format, const Body& body) {
  switch (format) {
    case CacheFormat::kFp8Scaled:
      return body(LatentRow<CacheFormat::kFp8Scaled>());
    case CacheFormat::kE4M3:
      return body(LatentRow<CacheFormat::kE4M3>());
    case CacheFormat::kE5M2:
      return body(LatentRow<CacheFormat::kE5M2>());
    default:
      FATHOM_CHECK(format == CacheFormat::kBF16, "a GPU has no cache in fp32");
      return body(LatentRow<CacheFormat::kBF16>());
  }
}

}  // namespace fathom::cuda
