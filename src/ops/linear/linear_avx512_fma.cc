// The kernels of linear_avx512.cc for CPUs that do more multiply-adds by fp32 FMAs than by
// vdpbf16ps, with the same bits. x is converted to fp32 a block at a time; each step's pairs of
// weights are split in registers. A single row stays with vdpbf16ps: there the weights' bytes are
// the limit.
#include <immintrin.h>

#include <iterator>

#include "device/cpu/bf16_fma_avx512.h"
#include "ops/linear/expand_avx512.h"
#include "ops/linear/linear_kernels.h"

namespace fathom {
namespace {

// One step of a pair in bf16: panel A's and panel B's vector.
template <bool kFp8, bool kRare>
inline __attribute__((always_inline)) void load_step(const E4m3Tables& tables, const E4m3Bits& bits,
                                                     const std::byte* weights, __m512i& a,
                                                     __m512i& b) {
  if constexpr (kFp8) {
    _mm_prefetch(reinterpret_cast<const char*>(weights) + kCodesAhead, _MM_HINT_T1);
  }
  a = _mm512_loadu_si512(weights);
  if constexpr (!kFp8) {
    b = _mm512_loadu_si512(weights + 64);
  } else if constexpr (kRare) {
    expand(tables, a, a, b);
  } else {
    expand_normal_bytes(bits, a, a, b);
  }
}

// One step of all pairs and rows; x points at the step's two columns of the first row.
template <bool kFp8, bool kRare, int kRows, int kPairs>
inline __attribute__((always_inline)) void dot_step(const E4m3Tables& tables, const E4m3Bits& bits,
                                                    const std::byte* weights, const float* x,
                                                    __m512 (&sums)[kRows][2 * kPairs]) {
#pragma GCC unroll 2
  for (int p = 0; p < kPairs; ++p) {
    __m512i a, b;
    load_step<kFp8, kRare>(tables, bits, weights + int64_t{kFp8 ? 64 : 128} * p, a, b);
    const __m512 first[2] = {first_of_pairs(a), first_of_pairs(b)};
    const __m512 second[2] = {second_of_pairs(a), second_of_pairs(b)};
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const float* const columns = x + int64_t{r} * kBlockColumns;
      const __m512 x0 = _mm512_set1_ps(columns[0]), x1 = _mm512_set1_ps(columns[1]);
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        __m512& sum = sums[r][2 * p + i];
        sum = _mm512_fmadd_ps(first[i], x0, _mm512_fmadd_ps(second[i], x1, sum));
      }
    }
  }
}

// 128 columns of a row as fp32, zero behind `count`.
inline __attribute__((always_inline)) void widen_block(const uint16_t* x, int64_t count,
                                                       float* out) {
  for (int64_t k = 0; k < kBlockColumns; k += 16) {
    const int64_t left = count - k;
    const auto lanes = static_cast<__mmask16>(left >= 16  ? 0xFFFF
                                              : left <= 0 ? 0
                                                          : (1u << left) - 1);
    const __m256i bits = _mm256_maskz_loadu_epi16(lanes, x + k);
    _mm512_storeu_ps(out + k,
                     _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16)));
  }
}

template <bool kFp8, int kRows, int kPairs>
void dot_rows(const uint16_t* const* x, const PackedBlocks& weights, float* out,
              int64_t pair_stride) {
  const E4m3Tables tables;
  const E4m3Bits bits;
  const int64_t stride = weights.step_stride;
  const auto total = [&](int r, int p) {
    return out + p / 2 * pair_stride + int64_t{r} * kPairRows + int64_t{p % 2} * 16;
  };
  for (int r = 0; r < kRows; ++r) {
    for (int p = 0; p < 2 * kPairs; ++p) _mm512_storeu_ps(total(r, p), _mm512_setzero_ps());
  }
  alignas(64) float wide[kRows * kBlockColumns];
  const std::byte* block = weights.data;
  const uint64_t* rare_steps = weights.rare_steps;
  for (int64_t column = 0; column < weights.columns;
       column += kBlockColumns, block += weights.block_stride) {
    const int64_t left = weights.columns - column;
    const int64_t count = left < kBlockColumns ? left : kBlockColumns;
    for (int r = 0; r < kRows; ++r) widen_block(x[r] + column, count, wide + r * kBlockColumns);
    __m512 sums[kRows][2 * kPairs];
#pragma GCC unroll 4
    for (auto& row : sums) {
#pragma GCC unroll 4
      for (auto& sum : row) sum = _mm512_setzero_ps();
    }
    const std::byte* step = block;
    uint64_t rare = 0;
    if constexpr (kFp8) rare = *rare_steps++;
    {
      const FlushToZero zero;
      for (int64_t k = 0; k < count; k += 2, step += stride, rare >>= 1) {
        // NOLINTNEXTLINE(bugprone-branch-clone): both are one without FP8
        if (kFp8 && __builtin_expect(static_cast<long>(rare & 1), 0)) {
          dot_step<kFp8, kFp8, kRows, kPairs>(tables, bits, step, wide + k, sums);
        } else {
          dot_step<kFp8, false, kRows, kPairs>(tables, bits, step, wide + k, sums);
        }
      }
      FlushToZero::pin(sums);
    }
#pragma GCC unroll 4
    for (int p = 0; p < 2 * kPairs; ++p) {
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const __m512 old = _mm512_loadu_ps(total(r, p));
        __m512 sum = sums[r][p];
        if constexpr (kFp8) {
          const __m512 scales = _mm512_loadu_ps(step + weights.scales_shift + int64_t{64} * p);
          sum = _mm512_fmadd_ps(sum, scales, old);
        } else {
          sum = _mm512_add_ps(sum, old);
        }
        _mm512_storeu_ps(total(r, p), sum);
      }
    }
  }
}

template <bool kFp8>
void dot_any(const uint16_t* const* x, int rows, const PackedBlocks& weights, int pairs, float* out,
             int64_t pair_stride) {
  if (rows == 1) {
    const auto one_row = kFp8 ? kLinearAvx512.dot_fp8 : kLinearAvx512.dot_bf16;
    return one_row(x, rows, weights, pairs, out, pair_stride);
  }
  using Kernel = void (*)(const uint16_t* const*, const PackedBlocks&, float*, int64_t);
  static constexpr Kernel kKernels[2][kMaxDotRows - 1] = {
      {dot_rows<kFp8, 2, 1>, dot_rows<kFp8, 3, 1>, dot_rows<kFp8, 4, 1>},
      {dot_rows<kFp8, 2, 2>, dot_rows<kFp8, 3, 2>, dot_rows<kFp8, 4, 2>}};
  kKernels[pairs - 1][rows - 2](x, weights, out, pair_stride);
}

// ---- prefill ----

template <int kRows>
void tile_rows(const float* x, const std::byte* weights, int64_t stride, int steps,
               const float* scales, float* totals, const std::byte* ahead, int64_t ahead_stride) {
  __m512 sums[kRows][2];
#pragma GCC unroll 12
  for (auto& row : sums) row[0] = row[1] = _mm512_setzero_ps();
  {
    const FlushToZero zero;
    for (int s = 0; s < steps; ++s, weights += stride, ahead += ahead_stride) {
      const __m512i pairs[2] = {_mm512_loadu_si512(weights), _mm512_loadu_si512(weights + 64)};
      _mm_prefetch(reinterpret_cast<const char*>(ahead), _MM_HINT_T1);
      _mm_prefetch(reinterpret_cast<const char*>(ahead + 64), _MM_HINT_T1);
#pragma GCC unroll 2
      for (int second = 1; second >= 0; --second) {
        const __m512 a = second ? second_of_pairs(pairs[0]) : first_of_pairs(pairs[0]);
        const __m512 b = second ? second_of_pairs(pairs[1]) : first_of_pairs(pairs[1]);
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r) {
          const __m512 value = _mm512_set1_ps(x[r * kBlockColumns + 2 * s + second]);
          sums[r][0] = _mm512_fmadd_ps(a, value, sums[r][0]);
          sums[r][1] = _mm512_fmadd_ps(b, value, sums[r][1]);
        }
      }
    }
    FlushToZero::pin(sums);
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int p = 0; p < 2; ++p) {
      float* const total = totals + int64_t{r} * kPairRows + int64_t{p} * 16;
      const __m512 old = _mm512_loadu_ps(total);
      _mm512_storeu_ps(
          total, scales == nullptr
                     ? _mm512_add_ps(sums[r][p], old)
                     : _mm512_fmadd_ps(sums[r][p], _mm512_loadu_ps(scales + int64_t{p} * 16), old));
    }
  }
}

void tile_bf16(const uint16_t* x, int rows, const std::byte* weights, int64_t stride, int steps,
               const float* scales, float* sums, const std::byte* ahead, int64_t ahead_stride) {
  using Tile = void (*)(const float*, const std::byte*, int64_t, int, const float*, float*,
                        const std::byte*, int64_t);
  static constexpr Tile kTiles[] = {tile_rows<1>, tile_rows<2>,  tile_rows<3>,  tile_rows<4>,
                                    tile_rows<5>, tile_rows<6>,  tile_rows<7>,  tile_rows<8>,
                                    tile_rows<9>, tile_rows<10>, tile_rows<11>, tile_rows<12>};
  alignas(64) float wide[std::size(kTiles) * kBlockColumns];
  for (int r = 0; r < rows; ++r) {
    const int64_t at = int64_t{r} * kBlockColumns;
    widen_block(x + at, kBlockColumns, wide + at);
  }
  kTiles[rows - 1](wide, weights, stride, steps, scales, sums, ahead, ahead_stride);
}

}  // namespace

const LinearKernels& linear_avx512_fma() {
  static const LinearKernels kernels = [] {
    LinearKernels by_fma = kLinearAvx512;
    by_fma.few_rows = kMaxDotRows;
    by_fma.dot_bf16 = dot_any<false>;
    by_fma.dot_fp8 = dot_any<true>;
    by_fma.tile_bf16 = tile_bf16;
    return by_fma;
  }();
  return kernels;
}

}  // namespace fathom
