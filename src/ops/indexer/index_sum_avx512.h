// Sums over lanes that the AVX-512 and the AMX form of index scores share.
//
// Local to the vector files that include it: they are compiled for instructions that not every CPU
// has.
#pragma once

#include <immintrin.h>

#include "ops/indexer/index_kernels.h"

namespace fathom::cpu {
namespace {

// Heads padded to whole registers.
inline int64_t lanes_of(int64_t heads) {
  return (heads + kHeadLanes - 1) / kHeadLanes * kHeadLanes;
}

// total + weights * max(0, sums), lane by lane. The maximum of a NaN and a number is the second
// operand: NaN stays.
inline __attribute__((always_inline)) __m512 add_positive(__m512 total, const float* weights,
                                                          __m512 sums) {
  return _mm512_fmadd_ps(_mm512_loadu_ps(weights), _mm512_max_ps(_mm512_setzero_ps(), sums), total);
}

// Sums over the lanes of 16 keys: lane i of the result is key i's.
inline __attribute__((always_inline)) __m512 add_across(const float (*partial)[kHeadLanes]) {
  __m512 in_lane[4];
#pragma GCC unroll 4
  for (int64_t r = 0; r < 4; ++r) {
    const __m512 a = _mm512_load_ps(partial[4 * r]), b = _mm512_load_ps(partial[4 * r + 1]);
    const __m512 c = _mm512_load_ps(partial[4 * r + 2]), d = _mm512_load_ps(partial[4 * r + 3]);
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512d lo = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    const __m512d hi = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    in_lane[r] = _mm512_add_ps(_mm512_castpd_ps(lo), _mm512_castpd_ps(hi));
  }
  const auto fold = [](__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
  };
  return fold(fold(in_lane[0], in_lane[1]), fold(in_lane[2], in_lane[3]));
}

// scores[i] = scales[i] * the sum over lanes of partial[i], i < num_keys rounded up to 16.
inline __attribute__((always_inline)) void store_scores(const float (*partial)[kHeadLanes],
                                                        const float* scales, int64_t num_keys,
                                                        float* scores) {
  for (int64_t i = 0; i < num_keys; i += kHeadLanes) {
    _mm512_storeu_ps(scores + i,
                     _mm512_mul_ps(_mm512_loadu_ps(scales + i), add_across(partial + i)));
  }
}

}  // namespace
}  // namespace fathom::cpu
