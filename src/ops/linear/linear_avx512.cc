// GEMMs for AVX-512 with BF16, VBMI and GFNI (Zen 4, Sapphire Rapids).
//
// Decode (dot_*): one group (4 panels) times 1 … 4 rows; every load of weights is one vector of 16
// rows x 2 columns, multiplied by a broadcast pair of x. Four panels are four independent chains,
// which is what hides the latency of vdpbf16ps (6 cycles) at one load of 64 bytes a cycle, so a
// chain never has to be split over k.
// Prefill (tile_*): 12 rows times one pair: 24 sums, 2 weight vectors and a broadcast in the 32
// registers; 14 loads for 24 products, so the multipliers (one 512-bit product a cycle) decide.
#include <immintrin.h>

#include "base/math_constants.h"
#include "ops/linear/dot_avx512.h"
#include "ops/linear/expand_avx512.h"
#include "ops/linear/linear_kernels.h"

namespace fathom {
namespace {

constexpr int kTileRows = 12;

// ---- decode ----

// How a step's weights become bf16.
enum class Dequantize { kNone, kExactly, kNormalBytes, kNormalWords };

// One step of all pairs and rows.
template <Dequantize kHow, int kRows, int kPairs>
inline __attribute__((always_inline)) void dot_step(const E4m3Tables& tables, const E4m3Bits& bits,
                                                    const std::byte* weights, const __m512i* x,
                                                    __m512 (&sums)[kRows][2 * kPairs]) {
#pragma GCC unroll 2
  for (int p = 0; p < kPairs; ++p) {
    __m512i a, b;
    if constexpr (kHow == Dequantize::kNone) {
      a = _mm512_loadu_si512(weights + int64_t{128} * p);
      b = _mm512_loadu_si512(weights + int64_t{128} * p + 64);
    } else {
      const std::byte* const at = weights + int64_t{64} * p;
      _mm_prefetch(reinterpret_cast<const char*>(at) + kCodesAhead, _MM_HINT_T1);
      const __m512i codes = _mm512_loadu_si512(at);
      if constexpr (kHow == Dequantize::kExactly) expand(tables, codes, a, b);
      if constexpr (kHow == Dequantize::kNormalBytes) expand_normal_bytes(bits, codes, a, b);
      if constexpr (kHow == Dequantize::kNormalWords) expand_normal_words(bits, codes, a, b);
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      sums[r][2 * p] = dot(sums[r][2 * p], a, x[r]);
      sums[r][2 * p + 1] = dot(sums[r][2 * p + 1], b, x[r]);
    }
  }
}

// The totals are in `out` between two blocks: in registers they would drive a block's sums out of
// them from three rows on.
template <bool kFp8, int kRows, int kPairs>
void dot_rows(const uint16_t* const* x, const PackedBlocks& weights, float* out,
              int64_t pair_stride) {
  // The units that multiply are the bottleneck from three rows on, those that shuffle before.
  constexpr auto kFast = !kFp8       ? Dequantize::kNone
                         : kRows > 2 ? Dequantize::kNormalWords
                                     : Dequantize::kNormalBytes;
  constexpr auto kExact = kFp8 ? Dequantize::kExactly : Dequantize::kNone;
  const E4m3Tables tables;
  const E4m3Bits bits;
  const int64_t stride = weights.step_stride;
  const auto total = [&](int r, int p) {
    return out + p / 2 * pair_stride + int64_t{r} * kPairRows + int64_t{p % 2} * 16;
  };
  for (int r = 0; r < kRows; ++r) {
    for (int p = 0; p < 2 * kPairs; ++p) _mm512_storeu_ps(total(r, p), _mm512_setzero_ps());
  }
  const std::byte* block = weights.data;
  const uint64_t* rare_steps = weights.rare_steps;
  for (int64_t column = 0; column < weights.columns;
       column += kBlockColumns, block += weights.block_stride) {
    const int64_t left = weights.columns - column;
    const int64_t count = left < kBlockColumns ? left : kBlockColumns;
    uint64_t rare = 0;
    if constexpr (kFp8) rare = *rare_steps++;
    __m512 sums[kRows][2 * kPairs];
    for (auto& row : sums) {
      for (auto& sum : row) sum = _mm512_setzero_ps();
    }
    const uint16_t* rows[kRows];
    for (int r = 0; r < kRows; ++r) rows[r] = x[r] + column;
    const std::byte* step = block;
    __m512i pairs[kRows];
    const auto multiply = [&]() __attribute__((always_inline)) {
      if (kFp8 && __builtin_expect(static_cast<long>(rare & 1), 0)) {
        dot_step<kExact, kRows, kPairs>(tables, bits, step, pairs, sums);
      } else {
        dot_step<kFast, kRows, kPairs>(tables, bits, step, pairs, sums);
      }
      step += stride;
      rare >>= 1;
    };
    for (int64_t k = 0; k + 1 < count; k += 2) {
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) pairs[r] = broadcast_pair(rows[r] + k);
      multiply();
    }
    if (count % 2 != 0) {
      for (int r = 0; r < kRows; ++r) pairs[r] = _mm512_set1_epi32(rows[r][count - 1]);
      multiply();
    }
    for (int p = 0; p < 2 * kPairs; ++p) {
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
  using Kernel = void (*)(const uint16_t* const*, const PackedBlocks&, float*, int64_t);
  static constexpr Kernel kKernels[2][kMaxDotRows] = {
      {dot_rows<kFp8, 1, 1>, dot_rows<kFp8, 2, 1>, dot_rows<kFp8, 3, 1>, dot_rows<kFp8, 4, 1>},
      {dot_rows<kFp8, 1, 2>, dot_rows<kFp8, 2, 2>, dot_rows<kFp8, 3, 2>, dot_rows<kFp8, 4, 2>}};
  kKernels[pairs - 1][rows - 1](x, weights, out, pair_stride);
}

// ---- prefill ----

template <int kRows>
inline __attribute__((always_inline)) void add_block(const __m512 (&sums)[kRows][2],
                                                     const float* scales, float* totals) {
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int p = 0; p < 2; ++p) {
      float* total = totals + int64_t{r} * kPairRows + int64_t{p} * 16;
      const __m512 old = _mm512_loadu_ps(total);
      _mm512_storeu_ps(
          total, scales == nullptr
                     ? _mm512_add_ps(sums[r][p], old)
                     : _mm512_fmadd_ps(sums[r][p], _mm512_loadu_ps(scales + int64_t{p} * 16), old));
    }
  }
}

template <int kRows>
void tile_bf16_rows(const uint16_t* x, const std::byte* weights, int64_t stride, int steps,
                    const float* scales, float* totals, const std::byte* ahead,
                    int64_t ahead_stride) {
  __m512 sums[kRows][2];
#pragma GCC unroll 12
  for (auto& row : sums) row[0] = row[1] = _mm512_setzero_ps();
  for (int s = 0; s < steps; ++s, weights += stride, ahead += ahead_stride) {
    const __m512i a = _mm512_loadu_si512(weights);
    const __m512i b = _mm512_loadu_si512(weights + 64);
    _mm_prefetch(reinterpret_cast<const char*>(ahead), _MM_HINT_T1);
    _mm_prefetch(reinterpret_cast<const char*>(ahead + 64), _MM_HINT_T1);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const __m512i pair = broadcast_pair(x + int64_t{r} * kBlockColumns + int64_t{2} * s);
      sums[r][0] = dot(sums[r][0], a, pair);
      sums[r][1] = dot(sums[r][1], b, pair);
    }
  }
  add_block<kRows>(sums, scales, totals);
}

template <int kRows>
void tile_f32_rows(const float* x, const std::byte* weights, int64_t stride, int steps,
                   const float* scales, float* totals, const std::byte* ahead,
                   int64_t ahead_stride) {
  __m512 sums[kRows][2];
#pragma GCC unroll 12
  for (auto& row : sums) row[0] = row[1] = _mm512_setzero_ps();
  for (int s = 0; s < steps; ++s, weights += stride, ahead += ahead_stride) {
    const __m512 a = _mm512_loadu_ps(weights);
    const __m512 b = _mm512_loadu_ps(weights + 64);
    _mm_prefetch(reinterpret_cast<const char*>(ahead), _MM_HINT_T1);
    _mm_prefetch(reinterpret_cast<const char*>(ahead + 64), _MM_HINT_T1);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const __m512 value = _mm512_set1_ps(x[r * kBlockColumns + s]);
      sums[r][0] = _mm512_fmadd_ps(a, value, sums[r][0]);
      sums[r][1] = _mm512_fmadd_ps(b, value, sums[r][1]);
    }
  }
  add_block<kRows>(sums, scales, totals);
}

using TileBf16 = void (*)(const uint16_t*, const std::byte*, int64_t, int, const float*, float*,
                          const std::byte*, int64_t);
constexpr TileBf16 kTileBf16[kTileRows] = {
    tile_bf16_rows<1>, tile_bf16_rows<2>,  tile_bf16_rows<3>,  tile_bf16_rows<4>,
    tile_bf16_rows<5>, tile_bf16_rows<6>,  tile_bf16_rows<7>,  tile_bf16_rows<8>,
    tile_bf16_rows<9>, tile_bf16_rows<10>, tile_bf16_rows<11>, tile_bf16_rows<12>};

void tile_bf16(const uint16_t* x, int rows, const std::byte* weights, int64_t stride, int steps,
               const float* scales, float* sums, const std::byte* ahead, int64_t ahead_stride) {
  kTileBf16[rows - 1](x, weights, stride, steps, scales, sums, ahead, ahead_stride);
}

using TileF32 = void (*)(const float*, const std::byte*, int64_t, int, const float*, float*,
                         const std::byte*, int64_t);
constexpr TileF32 kTileF32[kTileRows] = {tile_f32_rows<1>,  tile_f32_rows<2>,  tile_f32_rows<3>,
                                         tile_f32_rows<4>,  tile_f32_rows<5>,  tile_f32_rows<6>,
                                         tile_f32_rows<7>,  tile_f32_rows<8>,  tile_f32_rows<9>,
                                         tile_f32_rows<10>, tile_f32_rows<11>, tile_f32_rows<12>};

void tile_f32(const float* x, int rows, const std::byte* weights, int64_t stride, int steps,
              const float* scales, float* sums, const std::byte* ahead, int64_t ahead_stride) {
  kTileF32[rows - 1](x, weights, stride, steps, scales, sums, ahead, ahead_stride);
}

// ---- dequantization ----

void expand_fp8_to_bf16(const std::byte* weights, int64_t stride, int steps, std::byte* out,
                        int64_t out_stride) {
  const E4m3Tables tables;
  for (int s = 0; s < steps; ++s, weights += stride, out += out_stride) {
    __m512i a, b;
    expand(tables, _mm512_loadu_si512(weights), a, b);
    _mm512_storeu_si512(out, a);
    _mm512_storeu_si512(out + 64, b);
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

void expand_fp8_to_f32(const std::byte* weights, int64_t stride, int steps, float* out) {
  const E4m3Tables tables;
  for (int s = 0; s < steps; ++s, weights += stride, out += int64_t{2} * kPairRows) {
    __m512i a, b;
    expand(tables, _mm512_loadu_si512(weights), a, b);
    store_columns(a, b, out);
  }
}

void expand_bf16_to_f32(const std::byte* weights, int64_t stride, int steps, float* out) {
  for (int s = 0; s < steps; ++s, weights += stride, out += int64_t{2} * kPairRows) {
    store_columns(_mm512_loadu_si512(weights), _mm512_loadu_si512(weights + 64), out);
  }
}

// ---- finished sums ----

inline __attribute__((always_inline)) __mmask16 first_lanes(int64_t count) {
  return static_cast<__mmask16>(count >= 16 ? 0xFFFF : (1u << count) - 1);
}

// To nearest even by integer arithmetic: vcvtneps2bf16 would flush subnormals.
inline __attribute__((always_inline)) __m256i round_to_bf16(__m512 value) {
  const __m512i bits = _mm512_castps_si512(value);
  const __m512i lsb = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(lsb, _mm512_set1_epi32(0x7FFF)));
  const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, quiet), 16));
}

void store_bf16(const float* sums, int64_t count, uint16_t* out) {
  for (int64_t i = 0; i < count; i += 16) {
    const __mmask16 lanes = first_lanes(count - i);
    _mm256_mask_storeu_epi16(out + i, lanes, round_to_bf16(_mm512_maskz_loadu_ps(lanes, sums + i)));
  }
}

void add_scaled(const float* sums, float scale, int64_t count, float* out) {
  const __m512 factor = _mm512_set1_ps(scale);
  for (int64_t i = 0; i < count; i += 16) {
    const __mmask16 lanes = first_lanes(count - i);
    const __m512 old = _mm512_maskz_loadu_ps(lanes, out + i);
    const __m512 sum = _mm512_maskz_loadu_ps(lanes, sums + i);
    _mm512_mask_storeu_ps(out + i, lanes, _mm512_fmadd_ps(sum, factor, old));
  }
}

constexpr float kExpTerms[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};

// e^x by x = n ln 2 + r, |r| <= ln 2 / 2, and e^r's Taylor polynomial of degree 7 (error below
// 2^-26).
inline __attribute__((always_inline)) __m512 exp(__m512 x) {
  // NaN is the second operand, which min and max return.
  x = _mm512_max_ps(_mm512_set1_ps(-110.0f), x);
  x = _mm512_min_ps(_mm512_set1_ps(110.0f), x);
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(kLog2E)),
                                        _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 power = _mm512_set1_ps(1.0f / 5040);
  for (const float term : kExpTerms) {
    power = _mm512_fmadd_ps(power, r, _mm512_set1_ps(term));
  }
  return _mm512_scalef_ps(power, n);
}

inline __attribute__((always_inline)) __m512 swiglu(__m512 gate, __m512 up) {
  const __m512 one = _mm512_set1_ps(1.0f);
  const __m512 inverse = _mm512_add_ps(one, exp(_mm512_sub_ps(_mm512_setzero_ps(), gate)));
  return _mm512_mul_ps(_mm512_div_ps(gate, inverse), up);
}

void swiglu_f32(const float* gate, const float* up, int64_t count, float* out) {
  for (int64_t i = 0; i < count; i += 16) {
    const __mmask16 lanes = first_lanes(count - i);
    _mm512_mask_storeu_ps(
        out + i, lanes,
        swiglu(_mm512_maskz_loadu_ps(lanes, gate + i), _mm512_maskz_loadu_ps(lanes, up + i)));
  }
}

void swiglu_bf16(const float* gate, const float* up, int64_t count, uint16_t* out) {
  for (int64_t i = 0; i < count; i += 16) {
    const __mmask16 lanes = first_lanes(count - i);
    const __m512 value =
        swiglu(_mm512_maskz_loadu_ps(lanes, gate + i), _mm512_maskz_loadu_ps(lanes, up + i));
    _mm256_mask_storeu_epi16(out + i, lanes, round_to_bf16(value));
  }
}

}  // namespace

extern const LinearKernels kLinearAvx512;
const LinearKernels kLinearAvx512 = {.tile_rows = kTileRows,
                                     .few_rows = 16,
                                     .dot_bf16 = dot_any<false>,
                                     .dot_fp8 = dot_any<true>,
                                     .dot_four_bit = dot_four_bit_avx512,
                                     .tile_bf16 = tile_bf16,
                                     .tile_f32 = tile_f32,
                                     .tile_packed_fp8 = nullptr,
                                     .tile_packed_bf16 = nullptr,
                                     .matrix_bf16 = nullptr,
                                     .matrix_fp8 = nullptr,
                                     .expand_fp8_to_bf16 = expand_fp8_to_bf16,
                                     .expand_fp8_to_f32 = expand_fp8_to_f32,
                                     .expand_bf16_to_f32 = expand_bf16_to_f32,
                                     .expand_four_bit_to_bf16 = expand_four_bit_to_bf16_avx512,
                                     .expand_four_bit_to_f32 = expand_four_bit_to_f32_avx512,
                                     .store_bf16 = store_bf16,
                                     .add_scaled = add_scaled,
                                     .swiglu_f32 = swiglu_f32,
                                     .swiglu_bf16 = swiglu_bf16};

}  // namespace fathom
