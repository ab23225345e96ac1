// AVX-512 loops over rows of the latent cache in place: scores take 4 rows x 4 keys and add up
// across lanes at the end; values interleave two rows of the cache on load. Local to
// attention_avx512.cc; empty where AVX-512 is not compiled for.
#pragma once

#if defined(__AVX512BF16__)

#include "ops/attention/cpu/attention_avx512_elements.h"

namespace fathom::cpu {
namespace {

constexpr int kDirectRows = 4;

inline __attribute__((always_inline)) void fetch(const void* row, int64_t at) {
  _mm_prefetch(static_cast<const char*>(row) + at, _MM_HINT_T1);
}

// Lane r of the result (128 bits) holds the sums over all lanes of v[r][0 … 3].
__m512 add_across(const __m512 (&v)[kDirectRows][4]) {
  __m512 in_lane[kDirectRows];
#pragma GCC unroll 4
  for (int r = 0; r < kDirectRows; ++r) {
    const __m512 ab =
        _mm512_add_ps(_mm512_unpacklo_ps(v[r][0], v[r][1]), _mm512_unpackhi_ps(v[r][0], v[r][1]));
    const __m512 cd =
        _mm512_add_ps(_mm512_unpacklo_ps(v[r][2], v[r][3]), _mm512_unpackhi_ps(v[r][2], v[r][3]));
    const __m512d lo = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    const __m512d hi = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    in_lane[r] = _mm512_add_ps(_mm512_castpd_ps(lo), _mm512_castpd_ps(hi));
  }
  const auto fold = [](__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
  };
  return fold(fold(in_lane[0], in_lane[1]), fold(in_lane[2], in_lane[3]));
}

// The first R rows of add_across()'s result.
template <int R>
inline __attribute__((always_inline)) void store_scores(__m512 totals, float* scores) {
  _mm_storeu_ps(scores, _mm512_castps512_ps128(totals));
  if constexpr (R > 1) _mm_storeu_ps(scores + kTileKeys, _mm512_extractf32x4_ps(totals, 1));
  if constexpr (R > 2) _mm_storeu_ps(scores + 2 * kTileKeys, _mm512_extractf32x4_ps(totals, 2));
  if constexpr (R > 3) _mm_storeu_ps(scores + 3 * kTileKeys, _mm512_extractf32x4_ps(totals, 3));
}

template <typename T, int R, bool kFetchAhead>
void direct_scores_4(const uint8_t* q, int64_t q_bytes, const void* const* keys,
                     const void* const* next, int64_t dims, float* scores) {
  constexpr int64_t kStep = kWords * T::kPerWord;
  __m512 sums[kDirectRows][4];
  for (auto& row : sums) {
    for (__m512& sum : row) sum = _mm512_setzero_ps();
  }
  const auto* k0 = static_cast<const uint8_t*>(keys[0]);
  const auto* k1 = static_cast<const uint8_t*>(keys[1]);
  const auto* k2 = static_cast<const uint8_t*>(keys[2]);
  const auto* k3 = static_cast<const uint8_t*>(keys[3]);
  const auto step = [&](int64_t at, auto load) __attribute__((always_inline)) {
    if constexpr (kFetchAhead) {
      fetch(next[0], at);
      fetch(next[1], at);
    }
    const __m512i k[4] = {load(k0 + at), load(k1 + at), load(k2 + at), load(k3 + at)};
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const __m512i query = load(q + r * q_bytes + at);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) sums[r][j] = T::madd(sums[r][j], query, k[j]);
    }
  };
  const int64_t whole = dims / kStep;
  for (int64_t i = 0; i < whole; ++i) {
    step(i * 64, [](const uint8_t* p) { return _mm512_loadu_si512(p); });
  }
  if (whole * kStep < dims) {
    const int64_t left = dims - whole * kStep;
    step(whole * 64, [left](const uint8_t* p) { return load_elements<T>(p, left); });
  }
  store_scores<R>(add_across(sums), scores);
}

template <typename T>
void direct_scores(const void* q, int64_t q_stride, int64_t rows, const void* const* keys,
                   int64_t num_keys, int64_t dims, float* scores) {
  const int64_t q_bytes = q_stride * 4 / T::kPerWord;
  for (int64_t key = 0; key < num_keys; key += 4) {
    const void* const* next = keys + num_keys + key / 2;
    for (int64_t row = 0; row < rows; row += kDirectRows) {
      const uint8_t* query = static_cast<const uint8_t*>(q) + row * q_bytes;
      float* out = scores + row * kTileKeys + key;
      if (row > 0 && rows - row >= kDirectRows) {
        direct_scores_4<T, 4, false>(query, q_bytes, keys + key, next, dims, out);
        continue;
      }
      switch (rows - row) {
        case 1:
          direct_scores_4<T, 1, true>(query, q_bytes, keys + key, next, dims, out);
          break;
        case 2:
          direct_scores_4<T, 2, true>(query, q_bytes, keys + key, next, dims, out);
          break;
        case 3:
          direct_scores_4<T, 3, true>(query, q_bytes, keys + key, next, dims, out);
          break;
        default:
          direct_scores_4<T, 4, true>(query, q_bytes, keys + key, next, dims, out);
      }
    }
  }
}

// 64 columns of the values of one word's keys: for bf16 the pair's rows interleaved, whose columns
// are then in the order 0-3 8-11 16-19 24-27 | 4-7 12-15 20-23 28-31 of each 32.
template <typename T, bool kWhole>
inline __attribute__((always_inline)) void load_values(const void* const* values, int64_t column,
                                                       int64_t left, __m512i (&v)[4]) {
  if constexpr (T::kBf16) {
    const auto* even = static_cast<const uint16_t*>(values[0]) + column;
    const auto* odd = static_cast<const uint16_t*>(values[1]) + column;
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const __m512i a = kWhole ? _mm512_loadu_si512(even + half * 32)
                               : load_elements<T>(even + half * 32, left - half * 32);
      const __m512i b = kWhole ? _mm512_loadu_si512(odd + half * 32)
                               : load_elements<T>(odd + half * 32, left - half * 32);
      v[2 * half] = _mm512_unpacklo_epi16(a, b);
      v[2 * half + 1] = _mm512_unpackhi_epi16(a, b);
    }
  } else {
    const auto* row = static_cast<const float*>(values[0]) + column;
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      v[i] =
          kWhole ? _mm512_loadu_si512(row + i * 16) : load_elements<T>(row + i * 16, left - i * 16);
    }
  }
}

template <typename T>
inline __attribute__((always_inline)) void restore_columns(__m512 (&sums)[4]) {
  if constexpr (T::kBf16) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second =
        _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const __m512 lo = sums[2 * half];
      const __m512 hi = sums[2 * half + 1];
      sums[2 * half] = _mm512_permutex2var_ps(lo, first, hi);
      sums[2 * half + 1] = _mm512_permutex2var_ps(lo, second, hi);
    }
  }
}

// 64 columns for R rows.
template <typename T, int R, bool kWhole>
void direct_values_block(const uint32_t* p, const void* const* values, const void* const* next,
                         int64_t fetch_lines, int64_t key_words, int64_t column, int64_t left,
                         const float* rescale, float* out, int64_t out_stride) {
  constexpr int64_t kRowWords = kTileKeys / T::kPerWord;
  __m512 sums[R][4];
  for (auto& row : sums) {
    for (__m512& sum : row) sum = _mm512_setzero_ps();
  }
  for (int64_t word = 0; word < key_words; ++word) {
    __m512i v[4];
    load_values<T, kWhole>(values + word * T::kPerWord, column, left, v);
    if (word < fetch_lines) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) fetch(next[i], word * 64);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const __m512i weight = _mm512_set1_epi32(static_cast<int>(p[r * kRowWords + word]));
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) sums[r][i] = T::madd(sums[r][i], weight, v[i]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    restore_columns<T>(sums[r]);
    accumulate(sums[r], rescale[r], out + r * out_stride);
  }
}

template <typename T, int R>
void direct_values_rows(const uint32_t* p, const void* const* values, const void* const* next,
                        int64_t fetch_lines, int64_t key_words, int64_t column, int64_t left,
                        const float* rescale, float* out, int64_t out_stride) {
  if (left >= kValuePadding) {
    direct_values_block<T, R, true>(p, values, next, fetch_lines, key_words, column, left, rescale,
                                    out, out_stride);
  } else {
    direct_values_block<T, R, false>(p, values, next, fetch_lines, key_words, column, left, rescale,
                                     out, out_stride);
  }
}

template <typename T>
void direct_values(const void* p, int64_t rows, const void* const* values, int64_t num_keys,
                   int64_t value_dims, const float* rescale, float* out, int64_t out_stride) {
  const int64_t key_words = num_keys / T::kPerWord;  // num_keys is a multiple of 4
  const int64_t value_lines = (value_dims * 4 / T::kPerWord + 63) / 64;
  for (int64_t column = 0; column < value_dims; column += kValuePadding) {
    const int64_t left = value_dims - column;
    // Prefetches four keys a column block: for 512 values the eight blocks prefetch 32.
    const int64_t fetched = column / kValuePadding * 4;
    const void* const* next = values + num_keys + kLookahead / 2 + fetched;
    for (int64_t row = 0; row < rows; row += kDirectRows) {
      const int64_t fetch_lines = row == 0 && fetched < kLookahead / 2 ? value_lines : 0;
      const uint32_t* weights = static_cast<const uint32_t*>(p) + row * (kTileKeys / T::kPerWord);
      float* sums = out + row * out_stride + column;
      const float* factors = rescale + row;
      switch (rows - row) {
        case 1:
          direct_values_rows<T, 1>(weights, values, next, fetch_lines, key_words, column, left,
                                   factors, sums, out_stride);
          break;
        case 2:
          direct_values_rows<T, 2>(weights, values, next, fetch_lines, key_words, column, left,
                                   factors, sums, out_stride);
          break;
        case 3:
          direct_values_rows<T, 3>(weights, values, next, fetch_lines, key_words, column, left,
                                   factors, sums, out_stride);
          break;
        default:
          direct_values_rows<T, 4>(weights, values, next, fetch_lines, key_words, column, left,
                                   factors, sums, out_stride);
      }
    }
  }
}

}  // namespace
}  // namespace fathom::cpu

#endif
