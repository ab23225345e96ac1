// Products of pairs of bf16 by fp32 FMAs in AVX-512, with the bits of vdpbf16ps: that instruction
// adds the pair's second product, then its first, each with one rounding, and takes subnormal
// inputs and sums for zero. Intel's cores begin one vdpbf16ps in two cycles and two FMAs in each,
// which is twice as many multiply-adds (Sapphire Rapids: 0.73 and 0.18 ns).
//
// Local to the vector files that include it.
#pragma once

#if defined(__AVX512F__)

#include <immintrin.h>

namespace fathom {
namespace {

// The first and the second bf16 of each pair as fp32.
inline __attribute__((always_inline)) __m512 first_of_pairs(__m512i pairs) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
}
inline __attribute__((always_inline)) __m512 second_of_pairs(__m512i pairs) {
  return _mm512_castsi512_ps(
      _mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xFFFF0000))));
}

// While it lives this thread's subnormals are zero. Loads and stores stay where they are written;
// what else is computed has to be fed by loads after its beginning and to end in pinned sums.
class FlushToZero {
 public:
  FlushToZero() { set(before_ | kZeroInputs | kZeroResults); }
  ~FlushToZero() { set(before_); }
  FlushToZero(const FlushToZero&) = delete;
  FlushToZero& operator=(const FlushToZero&) = delete;

  // Sums are complete before what follows.
  template <int kRows, int kVectors>
  static inline __attribute__((always_inline)) void pin(__m512 (&sums)[kRows][kVectors]) {
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; ++i) asm volatile("" : "+v"(sums[r][i]));
    }
  }

 private:
  static constexpr unsigned kZeroInputs = 0x40, kZeroResults = 0x8000;  // of MXCSR
  static inline __attribute__((always_inline)) void set(unsigned mode) {
    asm volatile("ldmxcsr %0" : : "m"(mode) : "memory");
  }
  const unsigned before_ = _mm_getcsr();
};

}  // namespace
}  // namespace fathom

#endif
