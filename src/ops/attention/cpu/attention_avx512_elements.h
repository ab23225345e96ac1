// The two element types of the AVX-512 attention loops, counted in 32-bit words: a pair of bf16 or
// one float. Local to attention_avx512.cc; empty where AVX-512 is not compiled for.
#pragma once

#if defined(__AVX512BF16__)

#include <immintrin.h>

#include "device/cpu/bf16_fma_avx512.h"
#include "ops/attention/cpu/attention_kernels.h"

namespace fathom::cpu {
namespace {

constexpr int64_t kWords = 16;  // 32-bit words of a register

// Words are multiplied in kParts, one after the other.
struct F32 {
  static constexpr int64_t kPerWord = 1;
  static constexpr bool kBf16 = false;
  static constexpr int kParts = 1;
  static __m512i part(__m512i words, int /*part*/) { return words; }
  static __m512 madd(__m512 sum, __m512i a, __m512i b) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
  }
};

struct Bf16 {
  static constexpr int64_t kPerWord = 2;
  static constexpr bool kBf16 = true;
  static constexpr int kParts = 1;
  static __m512i part(__m512i words, int /*part*/) { return words; }
  static __m512 madd(__m512 sum, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
  }
};

// bf16 by fp32 FMAs, with the bits of Bf16 while FlushToZero is on.
struct Bf16ByFma {
  static constexpr int64_t kPerWord = 2;
  static constexpr bool kBf16 = true;
  static constexpr int kParts = 2;
  static __m512i part(__m512i words, int part) {
    return _mm512_castps_si512(part == 0 ? second_of_pairs(words) : first_of_pairs(words));
  }
  static __m512 madd(__m512 sum, __m512i a, __m512i b) { return F32::madd(sum, a, b); }
};

// The mask of `count` 16-bit or 32-bit lanes, count clipped to what a register has.
__mmask32 mask16(int64_t count) {
  return count >= 32 ? 0xFFFFFFFFu : count <= 0 ? 0u : (1u << count) - 1;
}
__mmask16 mask32(int64_t count) { return static_cast<__mmask16>(mask16(count < 16 ? count : 16)); }

// `count` elements from p (up to a register's), the rest zero.
template <typename T>
__m512i load_elements(const void* p, int64_t count) {
  if constexpr (T::kBf16) return _mm512_maskz_loadu_epi16(mask16(count), p);
  return _mm512_maskz_loadu_epi32(mask32(count), p);
}

__m512 widen(__m256i bits) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

__m256i narrow(__m512 value) { return (__m256i)_mm512_cvtneps_pbh(value); }

// Converts up to 16 values to the element type.
template <typename T>
void store_elements(__m512 value, int64_t index, int64_t count, void* out) {
  if constexpr (T::kBf16) {
    _mm256_mask_storeu_epi16(static_cast<uint16_t*>(out) + index, mask32(count), narrow(value));
  } else {
    _mm512_mask_storeu_ps(static_cast<float*>(out) + index, mask32(count), value);
  }
}

// out[0 … 63] = rescale * out + sums
inline __attribute__((always_inline)) void accumulate(const __m512 (&sums)[4], float rescale,
                                                      float* out) {
  if (rescale == 0.0f) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) _mm512_storeu_ps(out + i * 16, sums[i]);
    return;
  }
  const __m512 factor = _mm512_set1_ps(rescale);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512 before = _mm512_loadu_ps(out + i * 16);
    _mm512_storeu_ps(out + i * 16, _mm512_fmadd_ps(before, factor, sums[i]));
  }
}

}  // namespace
}  // namespace fathom::cpu

#endif
