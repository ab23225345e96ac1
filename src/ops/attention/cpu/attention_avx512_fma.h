// The loops of attention_avx512_direct.h in bf16 by fp32 FMAs, with the bits of vdpbf16ps
// (device/cpu/bf16_fma_avx512.h), except that a total that is subnormal is zero, too. Queries and
// probabilities are converted once a tile, keys and values are split in registers for the rows that
// share them. Local to attention_avx512.cc; empty where AVX-512 is not compiled for.
#pragma once

#if defined(__AVX512BF16__)

#include "device/cpu/bf16_fma_avx512.h"
#include "ops/attention/cpu/attention_avx512_direct.h"

namespace fathom::cpu {
namespace {

// Longer queries are multiplied by vdpbf16ps.
constexpr int64_t kMostFmaDims = 1024;
constexpr int64_t kStepDims = 32;  // a register of bf16

// A part of pairs of bf16 as fp32: vdpbf16ps adds the second elements' products first.
inline __attribute__((always_inline)) __m512 part_of(__m512i pairs, int part) {
  return part == 0 ? second_of_pairs(pairs) : first_of_pairs(pairs);
}

// Writes a query's part of [steps][2 parts][kDirectRows][16].
void split_query(const uint16_t* q, int64_t dims, float* out) {
  for (int64_t at = 0; at < dims; at += kStepDims, out += kDirectRows * kStepDims) {
    const __m512i pairs = load_elements<Bf16>(q + at, dims - at);
    _mm512_storeu_ps(out, part_of(pairs, 0));
    _mm512_storeu_ps(out + kDirectRows * kWords, part_of(pairs, 1));
  }
}

// As direct_scores_4, of queries that are split. Inlined, its sums would be spilled.
template <int R, bool kFetchAhead>
__attribute__((noinline)) void fma_scores_4(const float* q, const void* const* keys,
                                            const void* const* next, int64_t dims, float* scores) {
  __m512 sums[kDirectRows][4];
#pragma GCC unroll 4
  for (auto& row : sums) {
#pragma GCC unroll 4
    for (__m512& sum : row) sum = _mm512_setzero_ps();
  }
  const auto step = [&](int64_t at, auto load) __attribute__((always_inline)) {
    if constexpr (kFetchAhead) {
      fetch(next[0], 2 * at);
      fetch(next[1], 2 * at);
    }
    __m512i pairs[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      pairs[j] = load(static_cast<const uint16_t*>(keys[j]) + at);
      asm("" : "+v"(pairs[j]));  // one load for both parts
    }
#pragma GCC unroll 2
    for (int part = 0; part < 2; ++part) {
      __m512 k[4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) k[j] = part_of(pairs[j], part);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const __m512 query =
            _mm512_loadu_ps(q + at * kDirectRows + (part * kDirectRows + r) * kWords);
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) sums[r][j] = _mm512_fmadd_ps(query, k[j], sums[r][j]);
      }
    }
  };
  int64_t at = 0;
  for (; at + kStepDims <= dims; at += kStepDims) {
    step(at, [](const uint16_t* p) { return _mm512_loadu_si512(p); });
  }
  if (at < dims) {
    const int64_t left = dims - at;
    step(at, [left](const uint16_t* p) { return load_elements<Bf16>(p, left); });
  }
  store_scores<R>(add_across(sums), scores);
}

template <int R>
void fma_scores_rows(const float* q, const void* const* keys, int64_t num_keys, int64_t dims,
                     bool fetches, float* scores) {
  for (int64_t key = 0; key < num_keys; key += 4) {
    const void* const* next = keys + num_keys + key / 2;
    if (fetches) {
      fma_scores_4<R, true>(q, keys + key, next, dims, scores + key);
    } else {
      fma_scores_4<R, false>(q, keys + key, next, dims, scores + key);
    }
  }
}

void fma_direct_scores(const void* q, int64_t q_stride, int64_t rows, const void* const* keys,
                       int64_t num_keys, int64_t dims, float* scores) {
  if (dims > kMostFmaDims) {
    return direct_scores<Bf16>(q, q_stride, rows, keys, num_keys, dims, scores);
  }
  const FlushToZero zero;
  alignas(64) float split[kDirectRows * kMostFmaDims];
  for (int64_t row = 0; row < rows; row += kDirectRows) {
    const int64_t count = rows - row < kDirectRows ? rows - row : kDirectRows;
    for (int64_t r = 0; r < count; ++r) {
      split_query(static_cast<const uint16_t*>(q) + (row + r) * q_stride, dims, split + r * kWords);
    }
    float* const out = scores + row * kTileKeys;
    switch (count) {
      case 1:
        fma_scores_rows<1>(split, keys, num_keys, dims, row == 0, out);
        break;
      case 2:
        fma_scores_rows<2>(split, keys, num_keys, dims, row == 0, out);
        break;
      case 3:
        fma_scores_rows<3>(split, keys, num_keys, dims, row == 0, out);
        break;
      default:
        fma_scores_rows<4>(split, keys, num_keys, dims, row == 0, out);
    }
  }
}

// 64 columns for R rows; p [R][kTileKeys] in fp32.
template <int R, bool kWhole>
void fma_values_block(const float* p, const void* const* values, const void* const* next,
                      int64_t fetch_lines, int64_t num_keys, int64_t column, int64_t left,
                      const float* rescale, float* out, int64_t out_stride) {
  // Sums for each 32 columns: the odd columns, then the even ones.
  __m512 sums[R][4];
#pragma GCC unroll 4
  for (auto& row : sums) {
#pragma GCC unroll 4
    for (__m512& sum : row) sum = _mm512_setzero_ps();
  }
  for (int64_t word = 0; word < num_keys / 2; ++word) {
    if (word < fetch_lines) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) fetch(next[i], word * 64);
    }
#pragma GCC unroll 2
    for (int64_t key = 2 * word + 1; key >= 2 * word; --key) {
      const auto* row = static_cast<const uint16_t*>(values[key]) + column;
      const __m512i a = kWhole ? _mm512_loadu_si512(row) : load_elements<Bf16>(row, left);
      const __m512i b = kWhole ? _mm512_loadu_si512(row + kStepDims)
                               : load_elements<Bf16>(row + kStepDims, left - kStepDims);
      const __m512 v[4] = {part_of(a, 0), part_of(a, 1), part_of(b, 0), part_of(b, 1)};
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const __m512 weight = _mm512_set1_ps(p[r * kTileKeys + key]);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) sums[r][i] = _mm512_fmadd_ps(weight, v[i], sums[r][i]);
      }
    }
  }
  const __m512i lower = _mm512_setr_epi32(16, 0, 17, 1, 18, 2, 19, 3, 20, 4, 21, 5, 22, 6, 23, 7);
  const __m512i upper =
      _mm512_setr_epi32(24, 8, 25, 9, 26, 10, 27, 11, 28, 12, 29, 13, 30, 14, 31, 15);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    const __m512 ordered[4] = {_mm512_permutex2var_ps(sums[r][0], lower, sums[r][1]),
                               _mm512_permutex2var_ps(sums[r][0], upper, sums[r][1]),
                               _mm512_permutex2var_ps(sums[r][2], lower, sums[r][3]),
                               _mm512_permutex2var_ps(sums[r][2], upper, sums[r][3])};
    accumulate(ordered, rescale[r], out + r * out_stride);
  }
}

template <int R>
void fma_values_rows(const uint16_t* p, const void* const* values, int64_t num_keys,
                     int64_t value_dims, bool fetches, const float* rescale, float* out,
                     int64_t out_stride) {
  alignas(64) float wide[R * kTileKeys];
  for (int64_t i = 0; i < R * kTileKeys; i += kWords) {
    _mm512_storeu_ps(wide + i, widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + i))));
  }
  const int64_t value_lines = (value_dims * 2 + 63) / 64;
  for (int64_t column = 0; column < value_dims; column += kValuePadding) {
    const int64_t left = value_dims - column;
    // Prefetches four keys a column block: for 512 values the eight blocks prefetch 32.
    const int64_t fetched = column / kValuePadding * 4;
    const void* const* next = values + num_keys + kLookahead / 2 + fetched;
    const int64_t fetch_lines = fetches && fetched < kLookahead / 2 ? value_lines : 0;
    if (left >= kValuePadding) {
      fma_values_block<R, true>(wide, values, next, fetch_lines, num_keys, column, left, rescale,
                                out + column, out_stride);
    } else {
      fma_values_block<R, false>(wide, values, next, fetch_lines, num_keys, column, left, rescale,
                                 out + column, out_stride);
    }
  }
}

void fma_direct_values(const void* p, int64_t rows, const void* const* values, int64_t num_keys,
                       int64_t value_dims, const float* rescale, float* out, int64_t out_stride) {
  const FlushToZero zero;
  for (int64_t row = 0; row < rows; row += kDirectRows) {
    const auto* weights = static_cast<const uint16_t*>(p) + row * kTileKeys;
    float* const sums = out + row * out_stride;
    switch (rows - row) {
      case 1:
        fma_values_rows<1>(weights, values, num_keys, value_dims, row == 0, rescale + row, sums,
                           out_stride);
        break;
      case 2:
        fma_values_rows<2>(weights, values, num_keys, value_dims, row == 0, rescale + row, sums,
                           out_stride);
        break;
      case 3:
        fma_values_rows<3>(weights, values, num_keys, value_dims, row == 0, rescale + row, sums,
                           out_stride);
        break;
      default:
        fma_values_rows<4>(weights, values, num_keys, value_dims, row == 0, rescale + row, sums,
                           out_stride);
    }
  }
}

}  // namespace
}  // namespace fathom::cpu

#endif
