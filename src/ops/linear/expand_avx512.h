// Dequantizes E4M3 to bf16 in AVX-512 with VBMI: looks up the 7 bits without the sign in two tables
// of 128 bytes, one for each byte of the bf16: exact, subnormals and NaN too. (Shifting the bits
// into place would make E4M3's subnormals bf16 subnormals, which vdpbf16ps and AMX take for zero.)
//
// Local to the vector files that include it.
#pragma once

#if defined(__AVX512VBMI__)

#include <immintrin.h>

#include <cstdint>

namespace fathom {
namespace {

// Bytes that decode kernels prefetch ahead of the codes they read: they do so much between two
// loads that the hardware's prefetcher alone does not keep up.
constexpr int64_t kCodesAhead = 4096;

struct ByteTables {
  alignas(64) uint8_t low[128];
  alignas(64) uint8_t high[128];
};

constexpr ByteTables make_tables() {
  ByteTables tables{};
  for (int code = 0; code < 128; ++code) {
    const int mantissa = code & 7;
    int bits = ((code >> 3) + 120) << 7 | mantissa << 4;
    if (code == 0) bits = 0;
    if (code == 127) bits = 0x7FC0;
    if (code > 0 && code < 8) {  // mantissa * 2^-9, normalised
      const int top = mantissa >= 4 ? 2 : mantissa >= 2 ? 1 : 0;
      bits = (118 + top) << 7 | ((mantissa << (7 - top)) & 0x7F);
    }
    tables.low[code] = static_cast<uint8_t>(bits & 0xFF);
    tables.high[code] = static_cast<uint8_t>(bits >> 8);
  }
  return tables;
}

constexpr ByteTables kTables = make_tables();

struct E4m3Tables {
  __m512i low0 = _mm512_load_si512(kTables.low);
  __m512i low1 = _mm512_load_si512(kTables.low + 64);
  __m512i high0 = _mm512_load_si512(kTables.high);
  __m512i high1 = _mm512_load_si512(kTables.high + 64);
  __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
};

// A pair's step (64 codes) into panel A's and panel B's vector.
inline __attribute__((always_inline)) void expand(const E4m3Tables& tables, __m512i codes,
                                                  __m512i& a, __m512i& b) {
  const __m512i low = _mm512_permutex2var_epi8(tables.low0, codes, tables.low1);
  __m512i high = _mm512_permutex2var_epi8(tables.high0, codes, tables.high1);
  high = _mm512_ternarylogic_epi32(high, codes, tables.sign, 0xF8);  // high | (codes & sign)
  a = _mm512_unpacklo_epi8(low, high);
  b = _mm512_unpackhi_epi8(low, high);
}

#if defined(__GFNI__)

// Dequantizes normal codes, zero and subnormals excepted, by arithmetic, which takes fewer of the
// shuffle units that bound a decode step than the tables do. s eeee mmm -> s (eeee + 120) mmm0000.
struct E4m3Bits {
  // Matrices over GF(2), a row a byte, the result's highest bit first: mmm and the exponent's
  // lowest bit to the upper half of the low byte; the sign and the exponent's other bits.
  __m512i low = _mm512_set1_epi64(0x0000000001020408);
  __m512i high = _mm512_set1_epi64(0x1020400000000080);
  __m512i bias_byte = _mm512_set1_epi8(120 / 2);
  // The same for 16-bit lanes.
  __m512i kept = _mm512_set1_epi16(static_cast<short>(0x87F0));
  __m512i bias = _mm512_set1_epi16(120 << 7);
};

// By bytes: two operations fewer, but on the units that vdpbf16ps needs.
inline __attribute__((always_inline)) void expand_normal_bytes(const E4m3Bits& bits, __m512i codes,
                                                               __m512i& a, __m512i& b) {
  const __m512i low = _mm512_gf2p8affine_epi64_epi8(codes, bits.low, 0);
  const __m512i high =
      _mm512_add_epi8(_mm512_gf2p8affine_epi64_epi8(codes, bits.high, 0), bits.bias_byte);
  a = _mm512_unpacklo_epi8(low, high);
  b = _mm512_unpackhi_epi8(low, high);
}

inline __attribute__((always_inline)) void expand_normal_words(const E4m3Bits& bits, __m512i codes,
                                                               __m512i& a, __m512i& b) {
  const auto expand_words = [&](__m512i shifted) __attribute__((always_inline)) {
    const __m512i kept = _mm512_and_si512(_mm512_srai_epi16(shifted, 4), bits.kept);
    return _mm512_add_epi16(kept, bits.bias);
  };
  a = expand_words(_mm512_unpacklo_epi8(_mm512_setzero_si512(), codes));
  b = expand_words(_mm512_unpackhi_epi8(_mm512_setzero_si512(), codes));
}

#endif

}  // namespace
}  // namespace fathom

#endif
