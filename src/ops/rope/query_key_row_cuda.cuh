// A warp's computation of a token's rotations and its latent-cache row from registers. All launches
// that use it write bitwise identical rows.
#pragma once

#include "cache/latent_row_cuda.cuh"
#include "device/cuda/rows.cuh"

namespace fathom::cuda {

inline constexpr int kEightsAHead = 64 / 8;  // per rotary part of a head, and per rotary key

// x [8] is four pairs; cos_sin [4, 2].
__device__ inline Eight rotated(const Eight& x, const Eight& cos_sin) {
  Eight y;
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    y.v[i] = x.v[i] * cos_sin.v[i] - x.v[i + 1] * cos_sin.v[i + 1];
    y.v[i + 1] = x.v[i] * cos_sin.v[i + 1] + x.v[i + 1] * cos_sin.v[i];
  }
  return y;
}

// Below this a block of values counts as zero: it keeps the scale from being 0
// (cache/latent_row.cc).
inline constexpr float kAmaxFloor = 1e-4f;
inline constexpr float kE4M3Max = 448;

// The scale of the 128 values that this lane and 15 others hold, eight each.
__device__ inline float cache_scale(const Eight& x) {
  float amax = kAmaxFloor;
#pragma unroll
  for (int i = 0; i < 8; ++i) amax = fmaxf(amax, fabsf(x.v[i]));
#pragma unroll
  for (int distance = 1; distance < 16; distance *= 2) {
    amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, distance));
  }
  return amax / kE4M3Max;
}

// Eights `lane` and `lane` + 32 of a row's latent.
template <typename Row>
__device__ void store_latent(const Eight (&x)[2], int lane, std::byte* to) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int at = lane + e * kWarp;
    if constexpr (Row::kIsBf16) {
      store_eight(x[e], reinterpret_cast<__nv_bfloat16*>(to) + at * 8);
    } else if constexpr (Row::kIsScaled) {
      const float scale = cache_scale(x[e]);
      Eight scaled;
#pragma unroll
      for (int i = 0; i < 8; ++i) scaled.v[i] = x[e].v[i] / scale;
      reinterpret_cast<uint2*>(to)[at] = narrow_to_fp8<Row::kType>(scaled);
      if (lane % 16 == 0) reinterpret_cast<float*>(to + Row::kScalesAt)[at / 16] = scale;
    } else {
      reinterpret_cast<uint2*>(to)[at] = narrow_to_fp8<Row::kType>(x[e]);
    }
  }
}

// Writes the normed latent [512] and its rotated rotary key [64] to the row at `to`. A lane holds
// eights `lane` and `lane` + 32 of the latent; the first eight lanes hold one eight of the key
// each. cos_sin: the token's position. Called by whole warps.
template <typename Row>
__device__ void write_latent_row(const Eight (&x)[2], const Eight& key, const Eight (&weight)[2],
                                 float eps, const float* cos_sin, std::byte* to, int lane) {
  if (lane < kEightsAHead) {
    const Eight y = rotated(key, load_eight(cos_sin + lane * 8));
    if constexpr (Row::kRopeIsBf16) {
      store_eight(y, reinterpret_cast<__nv_bfloat16*>(to + Row::kRopeAt) + lane * 8);
    } else {
      reinterpret_cast<uint2*>(to + Row::kRopeAt)[lane] = narrow_to_fp8<Row::kType>(y);
    }
  }
  const float sum = warp_sum(sum_of_squares(x[0]) + sum_of_squares(x[1]));
  const float scale = inverse_rms(sum, Row::kLatent, eps);
  const Eight y[2] = {normed(x[0], weight[0], scale), normed(x[1], weight[1], scale)};
  store_latent<Row>(y, lane, to);
}

}  // namespace fathom::cuda
