// Dequantizes four-bit codes to fp32 by two permutations of eight values each (AVX2).
#include <immintrin.h>

#include "ops/linear/linear_kernels.h"

namespace fathom {

void expand_four_bit_to_f32_avx2(const std::byte* weights, int64_t step_stride, int steps,
                                 const FourBitTable& table, const uint8_t* zeros, float* out) {
  const __m256 low = _mm256_load_ps(table.f32);
  const __m256 high = _mm256_load_ps(table.f32 + 8);
  __m256 shifts[4];  // of panel A's rows, then B's, eight at a time
  for (int p = 0; p < 4; ++p) {
    shifts[p] = _mm256_setzero_ps();
    if (zeros == nullptr) continue;
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(zeros + 8 * p));
    shifts[p] = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
  }
  for (int s = 0; s < steps; ++s, weights += step_stride, out += 4 * kPairRows) {
    for (int half = 0; half < 2; ++half) {
      // Eight rows of both panels; a lane holds a row's columns 0 and 1 in its lower and upper
      // half.
      const __m256i words =
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights + 32 * half));
      for (int i = 0; i < 8; ++i) {
        const int column = i / 4 + i % 2 * 2, panel = i / 2 % 2;
        // permutevar takes the lowest three bits; the fourth goes to the sign, which blendv takes.
        const __m256i index = _mm256_srli_epi32(words, 4 * i);
        const __m256 from_low = _mm256_permutevar8x32_ps(low, index);
        const __m256 from_high = _mm256_permutevar8x32_ps(high, index);
        const __m256 is_high = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28));
        const __m256 value = _mm256_blendv_ps(from_low, from_high, is_high);
        _mm256_storeu_ps(out + column * kPairRows + panel * 16 + half * 8,
                         _mm256_add_ps(value, shifts[panel * 2 + half]));
      }
    }
  }
}

}  // namespace fathom
