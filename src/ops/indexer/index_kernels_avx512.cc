// What: the inner loops of index scores for AVX-512, in bf16 (vdpbf16ps: two multiply-adds a lane)
// and in fp32.
//
// Inputs, outputs, layout: index_kernels.h.
//
// Algorithm: K keys x Z registers of 16 heads in 24 registers of sums. A step loads Z words of 16
// heads, broadcasts a word of each key, and does K * Z multiply-adds: 6 keys with 64 heads take 24
// multiply-adds to 10 loads. Behind the last word ReLU, weights and a sum over registers leave 16
// partial sums a key, and 16 keys' are added up together.
//
// Determinism: a key's sums depend on the dimensions and the number of heads only, not on which
// keys are beside it.
//
// Limits: 8,192 multiply-adds a key (64 heads of 128) for 132 bytes: one Zen 4 core (32 of bf16 a
// cycle) takes 256 cycles a key, so arithmetic, not memory, is the limit.
#include <immintrin.h>

#include "ops/indexer/index_kernels.h"
#include "ops/indexer/index_sum_avx512.h"

namespace fathom::cpu {
namespace {

constexpr int64_t kWords = 16;  // 32-bit words of a register, lanes of heads
static_assert(kWords == kHeadLanes);

struct F32 {
  static constexpr int64_t kPerWord = 1;
  static __m512 madd(__m512 sum, __m512i a, __m512i b) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
  }
};

struct Bf16 {
  static constexpr int64_t kPerWord = 2;
  static __m512 madd(__m512 sum, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
  }
};

// --- Decoding

// The upper and the lower byte of each e4m3 magnitude as bf16: exact, subnormal codes too.
struct E4M3Table {
  alignas(64) uint8_t high[128];
  alignas(64) uint8_t low[128];
};

constexpr E4M3Table make_table() {
  E4M3Table table{};
  for (int code = 0; code < 128; ++code) {
    uint32_t bits = 0;
    const int exponent = code >> 3;
    const int mantissa = code & 7;
    if (code == 0x7F) {
      bits = 0x7FC0;
    } else if (exponent > 0) {
      bits = static_cast<uint32_t>((exponent - 7 + 127) << 7 | mantissa << 4);
    } else if (mantissa > 0) {
      const int top = mantissa >= 4 ? 2 : mantissa >= 2 ? 1 : 0;  // 2^-9 * mantissa
      bits = static_cast<uint32_t>((top - 9 + 127) << 7 | (mantissa << (7 - top) & 0x7F));
    }
    table.high[code] = static_cast<uint8_t>(bits >> 8);
    table.low[code] = static_cast<uint8_t>(bits & 0xFF);
  }
  return table;
}

constexpr E4M3Table kE4M3 = make_table();

// Up to 64 codes to bf16; a whole register's are stored without masks.
template <bool kWhole>
inline __attribute__((always_inline)) void decode_64(const uint8_t* codes, int64_t count,
                                                     uint16_t* out) {
  const __m512i high0 = _mm512_load_si512(kE4M3.high);
  const __m512i high1 = _mm512_load_si512(kE4M3.high + 64);
  const __m512i low0 = _mm512_load_si512(kE4M3.low);
  const __m512i low1 = _mm512_load_si512(kE4M3.low + 64);
  // Interleaving works within 128 bits: 64-bit pieces are put in its order first.
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  const __mmask64 mask = kWhole ? ~__mmask64{0} : (__mmask64{1} << count) - 1;
  const __m512i loaded = kWhole ? _mm512_loadu_si512(codes) : _mm512_maskz_loadu_epi8(mask, codes);
  const __m512i code = _mm512_permutexvar_epi64(order, loaded);
  const __m512i sign = _mm512_and_si512(code, _mm512_set1_epi8(static_cast<char>(0x80)));
  const __m512i high = _mm512_or_si512(_mm512_permutex2var_epi8(high0, code, high1), sign);
  const __m512i low = _mm512_permutex2var_epi8(low0, code, low1);
  const __m512i first = _mm512_unpacklo_epi8(low, high);
  const __m512i second = _mm512_unpackhi_epi8(low, high);
  if constexpr (kWhole) {
    _mm512_storeu_si512(out, first);
    _mm512_storeu_si512(out + 32, second);
  } else {
    _mm512_mask_storeu_epi16(out, static_cast<__mmask32>(mask), first);
    _mm512_mask_storeu_epi16(out + 32, static_cast<__mmask32>(mask >> 32), second);
  }
}

// `count` codes to bf16.
inline __attribute__((always_inline)) void decode_e4m3(const uint8_t* codes, int64_t count,
                                                       uint16_t* out) {
  int64_t i = 0;
  for (; i + 64 <= count; i += 64) decode_64<true>(codes + i, 64, out + i);
  if (i < count) decode_64<false>(codes + i, count - i, out + i);
}

template <typename T>
void decode(const std::byte* rows, int64_t count, IndexKeyFormat format, int64_t dim, void* keys,
            float* scales) {
  if (format == IndexKeyFormat::kE4M3) {
    auto* out = static_cast<uint16_t*>(keys);
    for (int64_t i = 0; i < count; ++i, rows += dim + 4, out += dim) {
      decode_e4m3(reinterpret_cast<const uint8_t*>(rows), dim, out);
      __builtin_memcpy(scales + i, rows + dim, sizeof *scales);
    }
    return;
  }
  __builtin_memcpy(keys, rows, static_cast<size_t>(count * dim) * 4 / T::kPerWord);
  for (int64_t i = 0; i < count; ++i) scales[i] = 1;
}

template <typename T>
void pack(const void* values, IndexKeyFormat format, int64_t head_stride, int64_t heads,
          int64_t dim, void* packed) {
  auto* out = static_cast<uint32_t*>(packed);
  const int64_t words = dim / T::kPerWord;
  for (int64_t first = 0; first < heads; first += kBlockHeads) {
    const int64_t left = heads - first < kBlockHeads ? heads - first : kBlockHeads;
    const int64_t lanes = lanes_of(left);
    for (int64_t h = 0; h < lanes; ++h) {
      // A piece of a head's words at a time: the stack holds it.
      constexpr int64_t kPiece = 64;
      for (int64_t word = 0; word < words; word += kPiece) {
        const int64_t count = words - word < kPiece ? words - word : kPiece;
        alignas(64) uint32_t piece[kPiece] = {};
        const int64_t at = (first + h) * head_stride + word * T::kPerWord;
        if (h < left) {
          if (format == IndexKeyFormat::kE4M3) {
            decode_e4m3(static_cast<const uint8_t*>(values) + at, count * T::kPerWord,
                        reinterpret_cast<uint16_t*>(piece));
          } else {
            __builtin_memcpy(piece, static_cast<const std::byte*>(values) + at * 4 / T::kPerWord,
                             static_cast<size_t>(count) * 4);
          }
        }
        for (int64_t i = 0; i < count; ++i) out[(word + i) * lanes + h] = piece[i];
      }
    }
    out += words * lanes;
  }
}

// --- Scores

// Adds a block of Z * 16 heads to the partial sums of a tile's keys (kFirst: writes them), K at a
// time.
template <typename T, int Z, int K, bool kFirst>
void score_block(const uint32_t* q, const float* weights, const uint32_t* keys, int64_t words,
                 int64_t num_keys, float (*partial)[kWords]) {
  static_assert(kIndexTileKeys % K == 0);
  for (int64_t first = 0; first < num_keys; first += K) {
    __m512 sums[K][Z];
#pragma GCC unroll 12
    for (int k = 0; k < K; ++k) {
#pragma GCC unroll 4
      for (int z = 0; z < Z; ++z) sums[k][z] = _mm512_setzero_ps();
    }
    const uint32_t* key = keys + first * words;
    for (int64_t word = 0; word < words; ++word) {
      __m512i head[Z];
#pragma GCC unroll 4
      for (int z = 0; z < Z; ++z) {
        head[z] = _mm512_loadu_si512(q + (word * Z + z) * kWords);
      }
#pragma GCC unroll 12
      for (int k = 0; k < K; ++k) {
        const __m512i broadcast = _mm512_set1_epi32(static_cast<int>(key[k * words + word]));
#pragma GCC unroll 4
        for (int z = 0; z < Z; ++z) sums[k][z] = T::madd(sums[k][z], head[z], broadcast);
      }
    }
#pragma GCC unroll 12
    for (int k = 0; k < K; ++k) {
      __m512 total = kFirst ? _mm512_setzero_ps() : _mm512_load_ps(partial[first + k]);
#pragma GCC unroll 4
      for (int z = 0; z < Z; ++z) {
        total = add_positive(total, weights + z * kWords, sums[k][z]);
      }
      _mm512_store_ps(partial[first + k], total);
    }
  }
}

template <typename T, bool kFirst>
void score_heads(int64_t lanes, const uint32_t* q, const float* weights, const uint32_t* keys,
                 int64_t words, int64_t num_keys, float (*partial)[kWords]) {
  switch (lanes / kWords) {
    case 1:
      return score_block<T, 1, 12, kFirst>(q, weights, keys, words, num_keys, partial);
    case 2:
      return score_block<T, 2, 12, kFirst>(q, weights, keys, words, num_keys, partial);
    case 3:
      return score_block<T, 3, 8, kFirst>(q, weights, keys, words, num_keys, partial);
    default:
      return score_block<T, 4, 6, kFirst>(q, weights, keys, words, num_keys, partial);
  }
}

template <typename T>
void score(const void* packed, const float* weights, int64_t heads, const void* keys,
           const float* scales, int64_t num_keys, int64_t dim, float* scores) {
  const int64_t words = dim / T::kPerWord;
  const auto* q = static_cast<const uint32_t*>(packed);
  const auto* k = static_cast<const uint32_t*>(keys);
  alignas(64) float partial[kIndexTileKeys][kWords] = {};
  for (int64_t first = 0; first < heads; first += kBlockHeads) {
    const int64_t left = heads - first < kBlockHeads ? heads - first : kBlockHeads;
    const int64_t lanes = lanes_of(left);
    if (first == 0) {
      score_heads<T, true>(lanes, q, weights, k, words, num_keys, partial);
    } else {
      score_heads<T, false>(lanes, q, weights + first, k, words, num_keys, partial);
    }
    q += words * lanes;
  }
  store_scores(partial, scales, num_keys, scores);
}

template <typename T>
constexpr IndexKernels kernels_of() {
  return {
      .bf16_elements = T::kPerWord == 2, .pack = pack<T>, .decode = decode<T>, .score = score<T>};
}

}  // namespace

const IndexKernels kAvx512Index = kernels_of<F32>();
const IndexKernels kAvx512Bf16Index = kernels_of<Bf16>();

}  // namespace fathom::cpu
