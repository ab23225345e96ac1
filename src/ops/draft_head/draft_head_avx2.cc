// AVX2: products are added by twos in 16 bits, then by fours in 32. Half a panel and up to two rows
// at a time: eight sums of 16 registers.
#include <immintrin.h>

#include "ops/draft_head/draft_head_kernels.h"

namespace fathom {
namespace {

constexpr int64_t kVectors = kPanelRows / 2 / 8;

template <int kRows>
void sums_of(const uint8_t* x, const int8_t* half, int64_t steps, int32_t* sums) {
  const int64_t columns = kStepColumns * steps;
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i totals[kRows][kVectors];
  for (auto& row : totals) {
    for (auto& total : row) total = _mm256_setzero_si256();
  }
  for (int64_t s = 0; s < steps; ++s, half += kPanelRows * kStepColumns, x += kStepColumns) {
    __m256i codes[kRows];
#pragma GCC unroll 2
    for (int r = 0; r < kRows; ++r) {
      int four;
      __builtin_memcpy(&four, x + r * columns, sizeof four);
      codes[r] = _mm256_set1_epi32(four);
    }
#pragma GCC unroll 4
    for (int64_t v = 0; v < kVectors; ++v) {
      const __m256i weights = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(half + 32 * v));
#pragma GCC unroll 2
      for (int r = 0; r < kRows; ++r) {
        const __m256i twos = _mm256_maddubs_epi16(codes[r], weights);
        totals[r][v] = _mm256_add_epi32(totals[r][v], _mm256_madd_epi16(twos, ones));
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int64_t v = 0; v < kVectors; ++v) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums + r * kPanelRows + 8 * v), totals[r][v]);
    }
  }
}

}  // namespace

void panel_sums_avx2(const uint8_t* x, int rows, const int8_t* panel, int64_t steps,
                     int32_t* sums) {
  for (int64_t half = 0; half < 2; ++half) {
    const int8_t* const weights = panel + half * 32 * kStepColumns;
    for (int r = 0; r < rows; r += 2) {
      const uint8_t* const row = x + r * kStepColumns * steps;
      int32_t* const out = sums + r * kPanelRows + half * 32;
      if (r + 1 < rows) {
        sums_of<2>(row, weights, steps, out);
      } else {
        sums_of<1>(row, weights, steps, out);
      }
    }
  }
}

}  // namespace fathom
