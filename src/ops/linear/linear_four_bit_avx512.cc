// Four-bit codes in AVX-512: GEMV and dequantization.
//
// A step of a pair is one vector of 32 words, each with four codes. Shifted right by 0, 4, 8 and 12
// its words index a table of 32 bf16 (vpermw takes the lowest five bits): panel A's columns (k, k +
// 1) and (k + 2, k + 3), then panel B's. So 128 weights cost a load, three shifts and four
// permutations, and none of them moves a value between lanes. Without zero points the table holds
// its 16 values twice, and the fifth bit, the next code's, needs no masking. With them the code is
// masked, and 16 - zero added.
#include <immintrin.h>

#include "ops/linear/dot_avx512.h"
#include "ops/linear/linear_kernels.h"

namespace fathom {
namespace {

// Bytes that GEMV prefetches ahead, as far as the other weights' kernels on AMX machines: a thread
// reads one stream, of which the hardware prefetcher leaves part of the memory rate unused.
constexpr int64_t kAhead = 4096;

// Into L2. It may lie beyond the matrix: prefetches do not fault.
inline __attribute__((always_inline)) void prefetch(const std::byte* at) {
  _mm_prefetch(reinterpret_cast<const char*>(at + kAhead), _MM_HINT_T1);
}

struct Panels {
  __m512i step0[2], step1[2];  // of panel A and B
};

// The vectors of 16 - zero point of panel A's and B's rows, in both halves of a lane.
struct Shifts {
  __m512i of[2];
};

inline __attribute__((always_inline)) Shifts load_shifts(const std::byte* zeros) {
  Shifts shifts;
  for (int p = 0; p < 2; ++p) {
    const __m512i rows = _mm512_cvtepu8_epi32(
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(zeros + int64_t{16} * p)));
    shifts.of[p] = _mm512_or_si512(rows, _mm512_slli_epi32(rows, 16));
  }
  return shifts;
}

template <bool kZeros>
inline __attribute__((always_inline)) __m512i look_up(__m512i table, __m512i index, __m512i shift) {
  if constexpr (kZeros) {
    index = _mm512_add_epi16(_mm512_and_si512(index, _mm512_set1_epi16(0xF)), shift);
  }
  return _mm512_permutexvar_epi16(index, table);
}

template <bool kZeros>
inline __attribute__((always_inline)) Panels expand(__m512i table, __m512i codes,
                                                    const Shifts& shifts) {
  Panels panels;
  panels.step0[0] = look_up<kZeros>(table, codes, shifts.of[0]);
  panels.step1[0] = look_up<kZeros>(table, _mm512_srli_epi16(codes, 4), shifts.of[0]);
  panels.step0[1] = look_up<kZeros>(table, _mm512_srli_epi16(codes, 8), shifts.of[1]);
  panels.step1[1] = look_up<kZeros>(table, _mm512_srli_epi16(codes, 12), shifts.of[1]);
  return panels;
}

// The 16 scales of panel `p` (0 or 1) of a pair, as fp32.
inline __attribute__((always_inline)) __m512 load_scales(const std::byte* scales, int p,
                                                         bool bf16_scales) {
  if (!bf16_scales) return _mm512_loadu_ps(scales + int64_t{64} * p);
  const __m256i narrow =
      _mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales + int64_t{32} * p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
}

// One step of all pairs and rows; x holds the rows' two pairs of columns.
template <bool kZeros, int kRows, int kPairs>
inline __attribute__((always_inline)) void dot_step(__m512i table, const std::byte* weights,
                                                    const Shifts (&shifts)[kPairs],
                                                    const __m512i (&x)[kRows][2],
                                                    __m512 (&sums)[kRows][2 * kPairs]) {
#pragma GCC unroll 2
  for (int p = 0; p < kPairs; ++p) {
    prefetch(weights + int64_t{64} * p);
    const Panels w =
        expand<kZeros>(table, _mm512_loadu_si512(weights + int64_t{64} * p), shifts[p]);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      sums[r][2 * p] = dot(dot(sums[r][2 * p], w.step0[0], x[r][0]), w.step1[0], x[r][1]);
      sums[r][2 * p + 1] = dot(dot(sums[r][2 * p + 1], w.step0[1], x[r][0]), w.step1[1], x[r][1]);
    }
  }
}

template <bool kZeros, int kRows, int kPairs>
void dot_rows(const uint16_t* const* x, const FourBitBlocks& weights, float* out,
              int64_t pair_stride) {
  const __m512i table = _mm512_load_si512(weights.table->bf16);
  const int64_t stride = weights.packed.step_stride, width = weights.block_columns;
  const bool bf16_scales = weights.bf16_scales;
  const int64_t zeros_at = kPairRows * int64_t{bf16_scales ? 2 : 4};
  __m512 totals[kRows][2 * kPairs];
  for (auto& row : totals) {
    for (auto& total : row) total = _mm512_setzero_ps();
  }
  const std::byte* block = weights.packed.data;
  for (int64_t column = 0; column < weights.packed.columns;
       column += width, block += weights.packed.block_stride) {
    const int64_t left = weights.packed.columns - column;
    const int64_t count = left < width ? left : width;
    const std::byte* const scales = block + (count + 3) / 4 * stride + weights.packed.scales_shift;
    Shifts shifts[kPairs];
    for (int p = 0; p < kPairs; ++p) {
      if constexpr (kZeros) shifts[p] = load_shifts(scales + p * weights.scale_bytes + zeros_at);
    }
    __m512 sums[kRows][2 * kPairs];
    for (auto& row : sums) {
      for (auto& sum : row) sum = _mm512_setzero_ps();
    }
    const std::byte* step = block;
    __m512i pairs[kRows][2];
    int64_t k = 0;
#pragma GCC unroll 4
    for (; k + 3 < count; k += 4, step += stride) {
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        pairs[r][0] = broadcast_pair(x[r] + column + k);
        pairs[r][1] = broadcast_pair(x[r] + column + k + 2);
      }
      dot_step<kZeros, kRows, kPairs>(table, step, shifts, pairs, sums);
    }
    if (k < count) {  // the matrix' last columns
      for (int r = 0; r < kRows; ++r) {
        uint16_t last[4] = {};
        for (int64_t c = 0; c < count - k; ++c) last[c] = x[r][column + k + c];
        pairs[r][0] = broadcast_pair(last);
        pairs[r][1] = broadcast_pair(last + 2);
      }
      dot_step<kZeros, kRows, kPairs>(table, step, shifts, pairs, sums);
    }
#pragma GCC unroll 4
    for (int p = 0; p < 2 * kPairs; ++p) {
      const std::byte* const of_pair = scales + p / 2 * weights.scale_bytes;
      if (p % 2 == 0) prefetch(of_pair);
      const __m512 factor = load_scales(of_pair, p % 2, bf16_scales);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        totals[r][p] = _mm512_fmadd_ps(sums[r][p], factor, totals[r][p]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int p = 0; p < 2 * kPairs; ++p) {
      _mm512_storeu_ps(out + p / 2 * pair_stride + int64_t{r} * kPairRows + int64_t{p % 2} * 16,
                       totals[r][p]);
    }
  }
}

template <bool kZeros>
void dot_any(const uint16_t* const* x, int rows, const FourBitBlocks& weights, int pairs,
             float* out, int64_t pair_stride) {
  using Kernel = void (*)(const uint16_t* const*, const FourBitBlocks&, float*, int64_t);
  static constexpr Kernel kKernels[2][kMaxDotRows] = {
      {dot_rows<kZeros, 1, 1>, dot_rows<kZeros, 2, 1>, dot_rows<kZeros, 3, 1>,
       dot_rows<kZeros, 4, 1>},
      {dot_rows<kZeros, 1, 2>, dot_rows<kZeros, 2, 2>, dot_rows<kZeros, 3, 2>,
       dot_rows<kZeros, 4, 2>}};
  kKernels[pairs - 1][rows - 1](x, weights, out, pair_stride);
}

// Calls body(step, panels) for each step.
template <bool kZeros, typename Body>
inline __attribute__((always_inline)) void for_each_step(const std::byte* weights, int64_t stride,
                                                         int steps, const FourBitTable& table,
                                                         const uint8_t* zeros, const Body& body) {
  const __m512i values = _mm512_load_si512(table.bf16);
  Shifts shifts = {};
  if constexpr (kZeros) shifts = load_shifts(reinterpret_cast<const std::byte*>(zeros));
  for (int s = 0; s < steps; ++s, weights += stride) {
    body(s, expand<kZeros>(values, _mm512_loadu_si512(weights), shifts));
  }
}

// Panel A and B as (k, k + 1) pairs into two fp32 columns of 32 rows.
inline __attribute__((always_inline)) void store_columns(__m512i a, __m512i b, float* out) {
  const __m512i odd = _mm512_set1_epi32(static_cast<int>(0xFFFF0000));
  _mm512_storeu_si512(out, _mm512_slli_epi32(a, 16));
  _mm512_storeu_si512(out + 16, _mm512_slli_epi32(b, 16));
  _mm512_storeu_si512(out + 32, _mm512_and_si512(a, odd));
  _mm512_storeu_si512(out + 48, _mm512_and_si512(b, odd));
}

}  // namespace

void dot_four_bit_avx512(const uint16_t* const* x, int rows, const FourBitBlocks& weights,
                         int pairs, float* sums, int64_t pair_stride) {
  if (weights.zeros) {
    dot_any<true>(x, rows, weights, pairs, sums, pair_stride);
  } else {
    dot_any<false>(x, rows, weights, pairs, sums, pair_stride);
  }
}

void expand_four_bit_to_bf16_avx512(const std::byte* weights, int64_t step_stride, int steps,
                                    const FourBitTable& table, const uint8_t* zeros,
                                    std::byte* out) {
  const auto store = [&](int s, const Panels& panels) {
    std::byte* const to = out + int64_t{256} * s;
    _mm512_storeu_si512(to, panels.step0[0]);
    _mm512_storeu_si512(to + 64, panels.step0[1]);
    _mm512_storeu_si512(to + 128, panels.step1[0]);
    _mm512_storeu_si512(to + 192, panels.step1[1]);
  };
  if (zeros != nullptr) {
    for_each_step<true>(weights, step_stride, steps, table, zeros, store);
  } else {
    for_each_step<false>(weights, step_stride, steps, table, zeros, store);
  }
}

void expand_four_bit_to_f32_avx512(const std::byte* weights, int64_t step_stride, int steps,
                                   const FourBitTable& table, const uint8_t* zeros, float* out) {
  const auto store = [&](int s, const Panels& panels) {
    store_columns(panels.step0[0], panels.step0[1], out + int64_t{4} * kPairRows * s);
    store_columns(panels.step1[0], panels.step1[1],
                  out + int64_t{4} * kPairRows * s + int64_t{2} * kPairRows);
  };
  if (zeros != nullptr) {
    for_each_step<true>(weights, step_stride, steps, table, zeros, store);
  } else {
    for_each_step<false>(weights, step_stride, steps, table, zeros, store);
  }
}

}  // namespace fathom
