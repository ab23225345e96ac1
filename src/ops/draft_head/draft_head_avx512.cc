// AVX-512 VNNI: an instruction multiplies 64 codes and adds them up by fours.
#include <immintrin.h>

#include "ops/draft_head/draft_head_kernels.h"

namespace fathom {
namespace {

constexpr int64_t kVectors = kPanelRows / 16;

template <int kRows>
void sums_of(const uint8_t* x, const int8_t* panel, int64_t steps, int32_t* sums) {
  const int64_t columns = kStepColumns * steps;
  __m512i totals[kRows][kVectors];
  for (auto& row : totals) {
    for (auto& total : row) total = _mm512_setzero_si512();
  }
  for (int64_t s = 0; s < steps; ++s, panel += kPanelRows * kStepColumns, x += kStepColumns) {
    __m512i codes[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      int four;
      __builtin_memcpy(&four, x + r * columns, sizeof four);
      codes[r] = _mm512_set1_epi32(four);
    }
#pragma GCC unroll 4
    for (int64_t v = 0; v < kVectors; ++v) {
      const __m512i weights = _mm512_loadu_si512(panel + 64 * v);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        totals[r][v] = _mm512_dpbusd_epi32(totals[r][v], codes[r], weights);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int64_t v = 0; v < kVectors; ++v) {
      _mm512_storeu_si512(sums + r * kPanelRows + 16 * v, totals[r][v]);
    }
  }
}

}  // namespace

void panel_sums_avx512(const uint8_t* x, int rows, const int8_t* panel, int64_t steps,
                       int32_t* sums) {
  switch (rows) {
    case 1:
      return sums_of<1>(x, panel, steps, sums);
    case 2:
      return sums_of<2>(x, panel, steps, sums);
    case 3:
      return sums_of<3>(x, panel, steps, sums);
    default:
      return sums_of<4>(x, panel, steps, sums);
  }
}

}  // namespace fathom
