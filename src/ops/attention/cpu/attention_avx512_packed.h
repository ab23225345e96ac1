// AVX-512 loops over packed tiles: keys are [words of a key][64 keys], values [words of 64 keys]
// [columns padded to 64], so that both GEMMs are the same loop: a word of the left side is
// broadcast and multiplied by 64 words of the right side, 6 rows x 64 columns of sums in 24
// registers. Local to attention_avx512.cc; empty where AVX-512 is not compiled for.
#pragma once

#if defined(__AVX512BF16__)

#include "ops/attention/cpu/attention_avx512_elements.h"

namespace fathom::cpu {
namespace {

constexpr int kPackedRows = 6;

int64_t padded(int64_t dims) { return (dims + kValuePadding - 1) / kValuePadding * kValuePadding; }

template <typename T>
int64_t words_of(int64_t elements) {
  return (elements + T::kPerWord - 1) / T::kPerWord;
}

template <typename T>
int64_t packed_keys_bytes(int64_t dims) {
  return words_of<T>(dims) * kTileKeys * 4;
}

template <typename T>
int64_t packed_values_bytes(int64_t dims) {
  return kTileKeys / T::kPerWord * padded(dims) * 4;
}

// Up to 16 words of elements from rows of either type.
template <typename T>
__m512i load_words(const void* rows, bool rows_bf16, int64_t at, int64_t count) {
  if constexpr (T::kBf16) {
    return load_elements<Bf16>(static_cast<const uint16_t*>(rows) + at, count);
  } else {
    if (!rows_bf16) return load_elements<F32>(static_cast<const float*>(rows) + at, count);
    return _mm512_castps_si512(
        widen(_mm256_maskz_loadu_epi16(mask32(count), static_cast<const uint16_t*>(rows) + at)));
  }
}

// Transposes 16 x 16 words.
inline __attribute__((always_inline)) void transpose(__m512i (&v)[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    v[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    v[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    v[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    v[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  // Now v[4 g + j] holds, in its four 128-bit lanes, words j, j + 4, j + 8, j + 12 of rows 4 g … 4
  // g + 3.
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m512i a = _mm512_shuffle_i32x4(v[j], v[4 + j], 0x88);
    const __m512i b = _mm512_shuffle_i32x4(v[j], v[4 + j], 0xDD);
    const __m512i c = _mm512_shuffle_i32x4(v[8 + j], v[12 + j], 0x88);
    const __m512i d = _mm512_shuffle_i32x4(v[8 + j], v[12 + j], 0xDD);
    t[j] = _mm512_shuffle_i32x4(a, c, 0x88);
    t[4 + j] = _mm512_shuffle_i32x4(b, d, 0x88);
    t[8 + j] = _mm512_shuffle_i32x4(a, c, 0xDD);
    t[12 + j] = _mm512_shuffle_i32x4(b, d, 0xDD);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) v[i] = t[i];
}

template <typename T>
void pack_keys(const void* rows, int64_t stride, bool rows_bf16, int64_t num_keys, int64_t first,
               int64_t dims, void* packed) {
  auto* out = static_cast<uint32_t*>(packed) + first / T::kPerWord * kTileKeys;
  const int64_t words = words_of<T>(dims);
  for (int64_t key = 0; key < kTileKeys; key += 16) {
    for (int64_t word = 0; word < words; word += kWords) {
      const int64_t element = word * T::kPerWord;
      __m512i block[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
        block[i] = key + i < num_keys ? load_words<T>(rows, rows_bf16, (key + i) * stride + element,
                                                      dims - element)
                                      : _mm512_setzero_si512();
      }
      transpose(block);
      const int64_t count = words - word < kWords ? words - word : kWords;
      for (int64_t i = 0; i < count; ++i) {
        _mm512_storeu_si512(out + (word + i) * kTileKeys + key, block[i]);
      }
    }
  }
}

template <typename T>
void pack_values(const void* rows, int64_t stride, bool rows_bf16, int64_t num_keys, int64_t dims,
                 void* packed) {
  auto* out = static_cast<uint32_t*>(packed);
  const int64_t columns = padded(dims);
  for (int64_t key = 0; key < num_keys; key += T::kPerWord, out += columns) {
    for (int64_t column = 0; column < columns; column += kWords * T::kPerWord) {
      const int64_t left = dims - column;
      const __m512i even = load_words<T>(rows, rows_bf16, key * stride + column, left);
      if constexpr (T::kBf16) {
        const __m512i odd = key + 1 < num_keys
                                ? load_words<T>(rows, rows_bf16, (key + 1) * stride + column, left)
                                : _mm512_setzero_si512();
        // Lanes 0-1 and 2-3 of each 64 bits: permuted first, so that the interleaved halves come
        // out in the columns' order.
        const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
        const __m512i a = _mm512_permutexvar_epi64(order, even);
        const __m512i b = _mm512_permutexvar_epi64(order, odd);
        _mm512_storeu_si512(out + column, _mm512_unpacklo_epi16(a, b));
        _mm512_storeu_si512(out + column + kWords, _mm512_unpackhi_epi16(a, b));
      } else {
        _mm512_storeu_si512(out + column, even);
      }
    }
  }
}

// sums[r][0 … 63] = sum over words of a[r][word] * b[word][0 … 63]
template <typename T, int R>
inline __attribute__((always_inline)) void product(const uint32_t* a, int64_t a_stride,
                                                   const uint32_t* b, int64_t b_stride,
                                                   int64_t words, __m512 (&sums)[R][4]) {
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) sums[r][i] = _mm512_setzero_ps();
  }
  for (int64_t word = 0; word < words; ++word) {
    const uint32_t* row = b + word * b_stride;
#pragma GCC unroll 2
    for (int part = 0; part < T::kParts; ++part) {
      const __m512i right[4] = {
          T::part(_mm512_loadu_si512(row), part), T::part(_mm512_loadu_si512(row + 16), part),
          T::part(_mm512_loadu_si512(row + 32), part), T::part(_mm512_loadu_si512(row + 48), part)};
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        const __m512i left =
            T::part(_mm512_set1_epi32(static_cast<int>(a[r * a_stride + word])), part);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) sums[r][i] = T::madd(sums[r][i], left, right[i]);
      }
    }
  }
}

template <typename T, int R>
void scores_rows(const uint32_t* q, int64_t q_stride, const uint32_t* packed, int64_t words,
                 float* scores) {
  __m512 sums[R][4];
  product<T, R>(q, q_stride, packed, kTileKeys, words, sums);
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) _mm512_storeu_ps(scores + r * kTileKeys + i * 16, sums[r][i]);
  }
}

template <typename T, int R>
void values_rows(const uint32_t* p, const uint32_t* packed, int64_t columns, int64_t words,
                 const float* rescale, float* out, int64_t out_stride) {
  for (int64_t column = 0; column < columns; column += kValuePadding) {
    __m512 sums[R][4];
    product<T, R>(p, kTileKeys / T::kPerWord, packed + column, columns, words, sums);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) accumulate(sums[r], rescale[r], out + r * out_stride + column);
  }
}

// Calls body.operator()<R>(row) for the rows in groups of kPackedRows and for the remainder.
template <typename Body>
inline __attribute__((always_inline)) void for_row_groups(int64_t rows, const Body& body) {
  for (int64_t row = 0; row < rows; row += kPackedRows) {
    switch (rows - row) {
      case 1:
        body.template operator()<1>(row);
        break;
      case 2:
        body.template operator()<2>(row);
        break;
      case 3:
        body.template operator()<3>(row);
        break;
      case 4:
        body.template operator()<4>(row);
        break;
      case 5:
        body.template operator()<5>(row);
        break;
      default:
        body.template operator()<kPackedRows>(row);
    }
  }
}

template <typename T>
void packed_scores(const void* q, int64_t q_stride, int64_t rows, const void* packed, int64_t dims,
                   float* scores) {
  const auto* queries = static_cast<const uint32_t*>(q);
  const int64_t stride = q_stride / T::kPerWord;
  for_row_groups(rows, [&]<int R>(int64_t row) {
    scores_rows<T, R>(queries + row * stride, stride, static_cast<const uint32_t*>(packed),
                      words_of<T>(dims), scores + row * kTileKeys);
  });
}

template <typename T>
void packed_values(const void* p, int64_t rows, const void* packed, int64_t num_keys,
                   int64_t value_dims, const float* rescale, float* out, int64_t out_stride) {
  const auto* weights = static_cast<const uint32_t*>(p);
  for_row_groups(rows, [&]<int R>(int64_t row) {
    values_rows<T, R>(weights + row * (kTileKeys / T::kPerWord),
                      static_cast<const uint32_t*>(packed), padded(value_dims),
                      words_of<T>(num_keys), rescale + row, out + row * out_stride, out_stride);
  });
}

}  // namespace
}  // namespace fathom::cpu

#endif
