// GEMMs for AVX2 with FMA. Without a bf16 dot product, bf16 x and weights are upconverted to fp32,
// which is exact, block by block into the cache; 3 rows times one pair are 12 sums in the 16
// registers.
#include <immintrin.h>

#include "base/math_constants.h"
#include "ops/linear/linear_kernels.h"

namespace fathom {
namespace {

constexpr int kTileRows = 3;

template <int kRows>
void tile_rows(const float* x, const std::byte* weights, int64_t stride, int steps,
               const float* scales, float* totals) {
  __m256 sums[kRows][4];
  for (auto& row : sums) {
    for (auto& sum : row) sum = _mm256_setzero_ps();
  }
  for (int s = 0; s < steps; ++s, weights += stride) {
    const auto* column = reinterpret_cast<const float*>(weights);
    __m256 values[kRows];
#pragma GCC unroll 3
    for (int r = 0; r < kRows; ++r) values[r] = _mm256_broadcast_ss(x + r * kBlockColumns + s);
#pragma GCC unroll 4
    for (int p = 0; p < 4; ++p) {
      const __m256 w = _mm256_loadu_ps(column + 8 * p);
#pragma GCC unroll 3
      for (int r = 0; r < kRows; ++r) sums[r][p] = _mm256_fmadd_ps(w, values[r], sums[r][p]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int p = 0; p < 4; ++p) {
      float* total = totals + r * kPairRows + 8 * p;
      const __m256 old = _mm256_loadu_ps(total);
      _mm256_storeu_ps(total,
                       scales == nullptr
                           ? _mm256_add_ps(sums[r][p], old)
                           : _mm256_fmadd_ps(sums[r][p], _mm256_loadu_ps(scales + 8 * p), old));
    }
  }
}

void tile_f32(const float* x, int rows, const std::byte* weights, int64_t stride, int steps,
              const float* scales, float* sums, const std::byte*, int64_t) {
  switch (rows) {
    case 1:
      return tile_rows<1>(x, weights, stride, steps, scales, sums);
    case 2:
      return tile_rows<2>(x, weights, stride, steps, scales, sums);
    default:
      return tile_rows<3>(x, weights, stride, steps, scales, sums);
  }
}

// Eight rows' pairs of bf16 (k, k + 1) into column k and column k + 1.
inline __attribute__((always_inline)) void store_columns(__m256i pairs, float* out) {
  const __m256i odd = _mm256_set1_epi32(static_cast<int>(0xFFFF0000));
  _mm256_storeu_ps(out, _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)));
  _mm256_storeu_ps(out + kPairRows, _mm256_castsi256_ps(_mm256_and_si256(pairs, odd)));
}

void expand_bf16_to_f32(const std::byte* weights, int64_t stride, int steps, float* out) {
  for (int s = 0; s < steps; ++s, weights += stride, out += 2 * kPairRows) {
    for (int p = 0; p < 4; ++p) {
      store_columns(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights + 32 * p)),
                    out + 8 * p);
    }
  }
}

// The code's 7 bits put where an fp32 has its exponent's low bits and its mantissa's high ones are
// the value times 2^-120 (a subnormal fp32 if the code is subnormal); NaN is put right after.
inline __attribute__((always_inline)) __m256 e4m3_to_f32(__m256i codes) {
  const __m256i magnitude = _mm256_and_si256(codes, _mm256_set1_epi32(0x7F));
  const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(codes, _mm256_set1_epi32(0x80)), 24);
  const __m256 value = _mm256_mul_ps(_mm256_castsi256_ps(_mm256_slli_epi32(magnitude, 20)),
                                     _mm256_set1_ps(0x1.0p120f));
  const __m256i nan = _mm256_and_si256(_mm256_cmpeq_epi32(magnitude, _mm256_set1_epi32(0x7F)),
                                       _mm256_set1_epi32(0x7FC00000));
  return _mm256_or_ps(value, _mm256_castsi256_ps(_mm256_or_si256(sign, nan)));
}

void expand_fp8_to_f32(const std::byte* weights, int64_t stride, int steps, float* out) {
  const __m256i low = _mm256_set1_epi32(0xFF);
  for (int s = 0; s < steps; ++s, weights += stride, out += 2 * kPairRows) {
    for (int lane = 0; lane < 4; ++lane) {
      // Four rows of panel A and four of B, each two codes (k, k + 1).
      const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(weights + 16 * lane));
      const __m256i words = _mm256_cvtepu16_epi32(codes);
      const __m256 even = e4m3_to_f32(_mm256_and_si256(words, low));
      const __m256 odd = e4m3_to_f32(_mm256_srli_epi32(words, 8));
      _mm_storeu_ps(out + 4 * lane, _mm256_castps256_ps128(even));
      _mm_storeu_ps(out + 16 + 4 * lane, _mm256_extractf128_ps(even, 1));
      _mm_storeu_ps(out + kPairRows + 4 * lane, _mm256_castps256_ps128(odd));
      _mm_storeu_ps(out + kPairRows + 16 + 4 * lane, _mm256_extractf128_ps(odd, 1));
    }
  }
}

// ---- one or two rows: weights upconverted in registers ----

constexpr int kParts = 4;
constexpr int kAhead = 4096;  // bytes that are prefetched ahead, as AMX's vectors do

// Sums of one or two rows with a pair's 32 weight rows, eight of these a part: with FP8 four of
// panel A and four of B, as 16 bytes of a step hold them.
template <int kRows>
struct PartSums {
  __m256 sums[kRows][kParts];
  PartSums() {
#pragma GCC unroll 2
    for (auto& row : sums) {
#pragma GCC unroll 4
      for (auto& sum : row) sum = _mm256_setzero_ps();
    }
  }

  inline __attribute__((always_inline)) void add(int part, __m256 even, __m256 odd,
                                                 const __m256 (&x)[kRows][2]) {
#pragma GCC unroll 2
    for (int r = 0; r < kRows; ++r) {
      sums[r][part] = _mm256_fmadd_ps(even, x[r][0], sums[r][part]);
      sums[r][part] = _mm256_fmadd_ps(odd, x[r][1], sums[r][part]);
    }
  }

  // totals[kRows][32] += sums with FP8, times scales (or null).
  void add_to(const float* scales, float* totals) const {
#pragma GCC unroll 2
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) {
        float* const a = totals + r * kPairRows + 4 * part;
        const __m256 old = _mm256_loadu2_m128(a + 16, a);
        const __m256 sum = sums[r][part];
        const __m256 total =
            scales == nullptr
                ? _mm256_add_ps(sum, old)
                : _mm256_fmadd_ps(
                      sum, _mm256_loadu2_m128(scales + 16 + 4 * part, scales + 4 * part), old);
        _mm256_storeu2_m128(a + 16, a, total);
      }
    }
  }
};

template <int kRows>
inline __attribute__((always_inline)) void broadcast_columns(const float* x, int step,
                                                             __m256 (&out)[kRows][2]) {
#pragma GCC unroll 2
  for (int r = 0; r < kRows; ++r) {
    const float* const column = x + r * kBlockColumns + 2 * step;
    out[r][0] = _mm256_broadcast_ss(column);
    out[r][1] = _mm256_broadcast_ss(column + 1);
  }
}

// Normal codes (zero and subnormals excepted) by integer arithmetic: a byte shuffle puts a code
// into a lane's highest byte, s eeee mmm -> s (eeee + 120) mmm.
inline __attribute__((always_inline)) __m256 normal_to_f32(__m256i codes, __m256i places) {
  const __m256i high = _mm256_shuffle_epi8(codes, places);
  const __m256i kept =
      _mm256_and_si256(_mm256_srai_epi32(high, 4), _mm256_set1_epi32(static_cast<int>(0x87F00000)));
  return _mm256_castsi256_ps(_mm256_add_epi32(kept, _mm256_set1_epi32(120 << 23)));
}

template <int kRows>
void packed_fp8_rows(const float* x, const std::byte* weights, int64_t stride, int steps,
                     uint64_t rare_steps, const float* scales, float* totals) {
  constexpr char kNone = static_cast<char>(0x80);
  const __m256i even_places =
      _mm256_setr_epi8(kNone, kNone, kNone, 0, kNone, kNone, kNone, 2, kNone, kNone, kNone, 4,
                       kNone, kNone, kNone, 6, kNone, kNone, kNone, 8, kNone, kNone, kNone, 10,
                       kNone, kNone, kNone, 12, kNone, kNone, kNone, 14);
  const __m256i odd_places = _mm256_add_epi8(even_places, _mm256_set1_epi32(1 << 24));
  const __m256i low = _mm256_set1_epi32(0xFF);
  PartSums<kRows> sums;
  for (int s = 0; s < steps; ++s, weights += stride, rare_steps >>= 1) {
    __m256 values[kRows][2];
    broadcast_columns(x, s, values);
    _mm_prefetch(reinterpret_cast<const char*>(weights) + kAhead, _MM_HINT_T0);
    if (__builtin_expect(static_cast<long>(rare_steps & 1), 0)) {
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) {
        const __m256i words = _mm256_cvtepu16_epi32(
            _mm_loadu_si128(reinterpret_cast<const __m128i*>(weights + 16 * part)));
        sums.add(part, e4m3_to_f32(_mm256_and_si256(words, low)),
                 e4m3_to_f32(_mm256_srli_epi32(words, 8)), values);
      }
      continue;
    }
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
      const __m256i codes = _mm256_broadcastsi128_si256(
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(weights + 16 * part)));
      sums.add(part, normal_to_f32(codes, even_places), normal_to_f32(codes, odd_places), values);
    }
  }
  sums.add_to(scales, totals);
}

void tile_packed_fp8(const float* x, int rows, const std::byte* weights, int64_t stride, int steps,
                     uint64_t rare_steps, const float* scales, float* sums) {
  const auto kernel = rows == 1 ? packed_fp8_rows<1> : packed_fp8_rows<2>;
  kernel(x, weights, stride, steps, rare_steps, scales, sums);
}

template <int kRows>
void packed_bf16_rows(const float* x, const std::byte* weights, int64_t stride, int steps,
                      float* totals) {
  const __m256i odd = _mm256_set1_epi32(static_cast<int>(0xFFFF0000));
  PartSums<kRows> sums;
  for (int s = 0; s < steps; ++s, weights += stride) {
    __m256 values[kRows][2];
    broadcast_columns(x, s, values);
    _mm_prefetch(reinterpret_cast<const char*>(weights) + kAhead, _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(weights) + kAhead + 64, _MM_HINT_T0);
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) {
      const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights + 32 * p));
      sums.add(p, _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)),
               _mm256_castsi256_ps(_mm256_and_si256(pairs, odd)), values);
    }
  }
#pragma GCC unroll 2
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) {
      float* const total = totals + r * kPairRows + 8 * p;
      _mm256_storeu_ps(total, _mm256_add_ps(sums.sums[r][p], _mm256_loadu_ps(total)));
    }
  }
}

void tile_packed_bf16(const float* x, int rows, const std::byte* weights, int64_t stride, int steps,
                      float* sums) {
  const auto kernel = rows == 1 ? packed_bf16_rows<1> : packed_bf16_rows<2>;
  kernel(x, weights, stride, steps, sums);
}

// ---- finished sums ----

// The rest of a row that is not a whole vector goes through a copy, so that its values are computed
// by the same instructions.
struct Rest {
  alignas(32) float values[8] = {};
  Rest(const float* from, int64_t count) {
    for (int64_t i = 0; i < count; ++i) values[i] = from[i];
  }
  __m256 load() const { return _mm256_load_ps(values); }
};

inline __attribute__((always_inline)) __m128i round_to_bf16(__m256 value) {
  const __m256i bits = _mm256_castps_si256(value);
  const __m256i lsb = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(lsb, _mm256_set1_epi32(0x7FFF)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
  const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
}

inline __attribute__((always_inline)) void store(__m256 value, int64_t count, uint16_t* out) {
  alignas(16) uint16_t rounded[8];
  if (count >= 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), round_to_bf16(value));
    return;
  }
  _mm_store_si128(reinterpret_cast<__m128i*>(rounded), round_to_bf16(value));
  for (int64_t i = 0; i < count; ++i) out[i] = rounded[i];
}

inline __attribute__((always_inline)) void store(__m256 value, int64_t count, float* out) {
  if (count >= 8) {
    _mm256_storeu_ps(out, value);
    return;
  }
  alignas(32) float rest[8];
  _mm256_store_ps(rest, value);
  for (int64_t i = 0; i < count; ++i) out[i] = rest[i];
}

inline __attribute__((always_inline)) __m256 load(const float* from, int64_t count) {
  return count >= 8 ? _mm256_loadu_ps(from) : Rest(from, count).load();
}

void store_bf16(const float* sums, int64_t count, uint16_t* out) {
  for (int64_t i = 0; i < count; i += 8) store(load(sums + i, count - i), count - i, out + i);
}

void add_scaled(const float* sums, float scale, int64_t count, float* out) {
  const __m256 factor = _mm256_set1_ps(scale);
  for (int64_t i = 0; i < count; i += 8) {
    const __m256 old = load(out + i, count - i);
    store(_mm256_fmadd_ps(load(sums + i, count - i), factor, old), count - i, out + i);
  }
}

constexpr float kExpTerms[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};

// e^x by x = n ln 2 + r, |r| <= ln 2 / 2, and e^r's Taylor polynomial of degree 7 (error below
// 2^-26). 2^n is two factors, so that n may reach the subnormals and infinity.
inline __attribute__((always_inline)) __m256 exp(__m256 x) {
  // NaN is the second operand, which min and max return.
  x = _mm256_max_ps(_mm256_set1_ps(-110.0f), x);
  x = _mm256_min_ps(_mm256_set1_ps(110.0f), x);
  const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(kLog2E)),
                                   _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
  r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
  __m256 power = _mm256_set1_ps(1.0f / 5040);
  for (const float term : kExpTerms) {
    power = _mm256_fmadd_ps(power, r, _mm256_set1_ps(term));
  }
  const __m256i whole = _mm256_cvtps_epi32(n);
  const __m256i half = _mm256_srai_epi32(whole, 1);
  const __m256i bias = _mm256_set1_epi32(127);
  const __m256i first = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
  const __m256i second =
      _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(whole, half), bias), 23);
  return _mm256_mul_ps(_mm256_mul_ps(power, _mm256_castsi256_ps(first)),
                       _mm256_castsi256_ps(second));
}

template <typename Out>
inline __attribute__((always_inline)) void swiglu(const float* gate, const float* up, int64_t count,
                                                  Out* out) {
  const __m256 one = _mm256_set1_ps(1.0f);
  for (int64_t i = 0; i < count; i += 8) {
    const __m256 g = load(gate + i, count - i);
    const __m256 inverse = _mm256_add_ps(one, exp(_mm256_sub_ps(_mm256_setzero_ps(), g)));
    store(_mm256_mul_ps(_mm256_div_ps(g, inverse), load(up + i, count - i)), count - i, out + i);
  }
}

void swiglu_f32(const float* gate, const float* up, int64_t count, float* out) {
  swiglu(gate, up, count, out);
}

void swiglu_bf16(const float* gate, const float* up, int64_t count, uint16_t* out) {
  swiglu(gate, up, count, out);
}

}  // namespace

extern const LinearKernels kLinearAvx2;
const LinearKernels kLinearAvx2 = {.tile_rows = kTileRows,
                                   .few_rows = 0,
                                   .dot_bf16 = nullptr,
                                   .dot_fp8 = nullptr,
                                   .dot_four_bit = nullptr,
                                   .tile_bf16 = nullptr,
                                   .tile_f32 = tile_f32,
                                   .tile_packed_fp8 = tile_packed_fp8,
                                   .tile_packed_bf16 = tile_packed_bf16,
                                   .matrix_bf16 = nullptr,
                                   .matrix_fp8 = nullptr,
                                   .expand_fp8_to_bf16 = nullptr,
                                   .expand_fp8_to_f32 = expand_fp8_to_f32,
                                   .expand_bf16_to_f32 = expand_bf16_to_f32,
                                   .expand_four_bit_to_bf16 = nullptr,
                                   .expand_four_bit_to_f32 = expand_four_bit_to_f32_avx2,
                                   .store_bf16 = store_bf16,
                                   .add_scaled = add_scaled,
                                   .swiglu_f32 = swiglu_f32,
                                   .swiglu_bf16 = swiglu_bf16};

}  // namespace fathom
