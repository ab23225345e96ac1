// Products of pairs of bf16 in AVX-512, of the GEMV kernels. Local to the vector files that include
// it.
#pragma once

#if defined(__AVX512BF16__)

#include <immintrin.h>

#include <cstdint>

namespace fathom {
namespace {

inline __attribute__((always_inline)) __m512 dot(__m512 sum, __m512i weights, __m512i x) {
  return _mm512_dpbf16_ps(sum, (__m512bh)weights, (__m512bh)x);
}

inline __attribute__((always_inline)) __m512i broadcast_pair(const uint16_t* x) {
  int pair;
  __builtin_memcpy(&pair, x, sizeof pair);
  return _mm512_set1_epi32(pair);
}

}  // namespace
}  // namespace fathom

#endif
