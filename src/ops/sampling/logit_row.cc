// What: block maxima and block sums of exponentials over a row of logits, in scalar, AVX2 and
// AVX-512 form with the same operations on each element, so that all three give the same terms.
//
// exp: x = n ln 2 + r, |r| <= ln 2 / 2, ln 2 in two parts (Cody and Waite); e^r by the degree-7
// Taylor polynomial (its first omitted term is below 6e-9 of the result); times 2^n through the
// exponent bits.
#include "ops/sampling/logit_row.h"

#include "base/math_constants.h"

// GCC 12 warns about the undefined operand inside its own AVX-512 intrinsics. Clang does not know
// the warning.
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

#include "device/cpu/isa.h"

namespace fathom {
namespace {

constexpr float kLowest = -87;            // e^x is a normal number above this
constexpr float kLn2High = 0.693359375f;  // 355/512: n * kLn2High is exact for |n| < 2^15
constexpr float kLn2Low = -2.12194440e-4f;
constexpr float kC2 = 0.5f, kC3 = 1.0f / 6, kC4 = 1.0f / 24, kC5 = 1.0f / 120, kC6 = 1.0f / 720,
                kC7 = 1.0f / 5040;

// Inlined so that the caller's instruction set decides what std::fma and std::rint become.
[[gnu::always_inline]] inline float exp_scalar(float x) {
  if (!(x >= kLowest)) return 0;  // NaN too
  const float n = std::rint(x * kLog2E);
  const float r = std::fma(-n, kLn2Low, std::fma(-n, kLn2High, x));
  float p = std::fma(kC7, r, kC6);
  p = std::fma(p, r, kC5);
  p = std::fma(p, r, kC4);
  p = std::fma(p, r, kC3);
  p = std::fma(p, r, kC2);
  p = std::fma(p, r, 1.0f);
  p = std::fma(p, r, 1.0f);
  return p * std::bit_cast<float>((static_cast<int32_t>(n) + 127) << 23);
}

float block_max_scalar(const float* x, int64_t count) {
  float best = kNegativeInfinity;
  for (int64_t i = 0; i < count; ++i) best = x[i] > best ? x[i] : best;
  return best;
}

uint64_t block_sum_scalar(const float* x, int64_t count, float max, float inverse_temperature) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < count; ++i)
    sum += units_of(exp_scalar((x[i] - max) * inverse_temperature));
  return sum;
}

// ---- AVX2 ----

[[gnu::target("avx2,fma")]] float exp_one_avx2(float x) { return exp_scalar(x); }

[[gnu::target("avx2,fma")]] inline __m256 exp_avx2(__m256 x) {
  const __m256 keep = _mm256_cmp_ps(x, _mm256_set1_ps(kLowest), _CMP_GE_OQ);
  x = _mm256_and_ps(x, keep);
  const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(kLog2E)),
                                   _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(kLn2High), x);
  r = _mm256_fnmadd_ps(n, _mm256_set1_ps(kLn2Low), r);
  __m256 p = _mm256_fmadd_ps(_mm256_set1_ps(kC7), r, _mm256_set1_ps(kC6));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(kC5));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(kC4));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(kC3));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(kC2));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1));
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  const __m256 power = _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
  return _mm256_and_ps(_mm256_mul_ps(p, power), keep);
}

[[gnu::target("avx2,fma")]] void full_block_maxima_avx2(const float* x, int64_t blocks,
                                                        float* maxima) {
  for (int64_t b = 0; b < blocks; ++b, x += kLogitBlock) {
    __m256 best = _mm256_set1_ps(kNegativeInfinity);
    // max(a, b) is b when a is NaN.
    for (int i = 0; i < kLogitBlock; i += 8) best = _mm256_max_ps(_mm256_loadu_ps(x + i), best);
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(best), _mm256_extractf128_ps(best, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    half = _mm_max_ss(half, _mm_shuffle_ps(half, half, 1));
    maxima[b] = _mm_cvtss_f32(half);
  }
}

// AVX2 has no conversion to 64 bits: a term's units are its upper 17 bits and 24 more, both exact.
// A lane adds eight of each before they are widened to 64 bits.
[[gnu::target("avx2,fma")]] void full_block_sums_avx2(const float* x, int64_t blocks, float max,
                                                      float inverse_temperature, uint64_t* sums) {
  constexpr float kUpper = 0x1p16f, kLower = 0x1p24f;
  static_assert(kUpper * kLower == kTermUnits);
  const __m256 shift = _mm256_set1_ps(max), scale = _mm256_set1_ps(inverse_temperature);
  for (int64_t b = 0; b < blocks; ++b, x += kLogitBlock) {
    __m256i upper = _mm256_setzero_si256(), lower = _mm256_setzero_si256();
    for (int i = 0; i < kLogitBlock; i += 8) {
      const __m256 e = exp_avx2(_mm256_mul_ps(_mm256_sub_ps(_mm256_loadu_ps(x + i), shift), scale));
      const __m256 scaled = _mm256_mul_ps(e, _mm256_set1_ps(kUpper));
      const __m256i whole = _mm256_cvttps_epi32(scaled);
      const __m256 rest = _mm256_sub_ps(scaled, _mm256_cvtepi32_ps(whole));
      upper = _mm256_add_epi32(upper, whole);
      lower =
          _mm256_add_epi32(lower, _mm256_cvttps_epi32(_mm256_mul_ps(rest, _mm256_set1_ps(kLower))));
    }
    alignas(32) std::array<uint32_t, 8> uppers, lowers;
    _mm256_store_si256(reinterpret_cast<__m256i*>(uppers.data()), upper);
    _mm256_store_si256(reinterpret_cast<__m256i*>(lowers.data()), lower);
    uint64_t sum = 0;
    for (size_t lane = 0; lane < uppers.size(); ++lane) {
      sum += (uint64_t{uppers[lane]} << 24) + lowers[lane];
    }
    sums[b] = sum;
  }
}

// ---- AVX-512 ----

[[gnu::target("avx512f,avx512dq")]] inline __m512 exp_avx512(__m512 x) {
  const __mmask16 keep = _mm512_cmp_ps_mask(x, _mm512_set1_ps(kLowest), _CMP_GE_OQ);
  x = _mm512_maskz_mov_ps(keep, x);
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(kLog2E)),
                                        _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(kLn2High), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(kLn2Low), r);
  __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(kC7), r, _mm512_set1_ps(kC6));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(kC5));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(kC4));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(kC3));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(kC2));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1));
  return _mm512_maskz_scalef_ps(keep, p, n);
}

[[gnu::target("avx512f,avx512dq")]] void full_block_maxima_avx512(const float* x, int64_t blocks,
                                                                  float* maxima) {
  for (int64_t b = 0; b < blocks; ++b, x += kLogitBlock) {
    __m512 best = _mm512_set1_ps(kNegativeInfinity);
    for (int i = 0; i < kLogitBlock; i += 16) best = _mm512_max_ps(_mm512_loadu_ps(x + i), best);
    maxima[b] = _mm512_reduce_max_ps(best);
  }
}

[[gnu::target("avx512f,avx512dq")]] void full_block_sums_avx512(const float* x, int64_t blocks,
                                                                float max,
                                                                float inverse_temperature,
                                                                uint64_t* sums) {
  const __m512 shift = _mm512_set1_ps(max), scale = _mm512_set1_ps(inverse_temperature);
  const __m512 units = _mm512_set1_ps(kTermUnits);
  for (int64_t b = 0; b < blocks; ++b, x += kLogitBlock) {
    __m512i low = _mm512_setzero_si512(), high = _mm512_setzero_si512();
    for (int i = 0; i < kLogitBlock; i += 16) {
      const __m512 e =
          exp_avx512(_mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(x + i), shift), scale));
      const __m512 scaled = _mm512_mul_ps(e, units);
      low = _mm512_add_epi64(low, _mm512_cvttps_epu64(_mm512_castps512_ps256(scaled)));
      high = _mm512_add_epi64(high, _mm512_cvttps_epu64(_mm512_extractf32x8_ps(scaled, 1)));
    }
    sums[b] = static_cast<uint64_t>(_mm512_reduce_add_epi64(_mm512_add_epi64(low, high)));
  }
}

}  // namespace

void block_maxima(std::span<const float> logits, std::span<float> maxima) {
  const auto size = static_cast<int64_t>(logits.size());
  const int64_t full = size / kLogitBlock;
  switch (cpu_isa()) {
    case CpuIsa::kAvx512:
    case CpuIsa::kAmx:
      full_block_maxima_avx512(logits.data(), full, maxima.data());
      break;
    case CpuIsa::kAvx2:
      full_block_maxima_avx2(logits.data(), full, maxima.data());
      break;
    case CpuIsa::kScalar:
      for (int64_t b = 0; b < full; ++b) {
        maxima[b] = block_max_scalar(logits.data() + b * kLogitBlock, kLogitBlock);
      }
  }
  const int64_t rest = size - full * kLogitBlock;
  if (rest > 0) maxima[full] = block_max_scalar(logits.data() + full * kLogitBlock, rest);
}

float exp_term(float logit, float max, float inverse_temperature) {
  const float x = (logit - max) * inverse_temperature;
  return cpu_isa() == CpuIsa::kScalar ? exp_scalar(x) : exp_one_avx2(x);
}

uint64_t block_exp_sums(std::span<const float> logits, float max, float inverse_temperature,
                        std::span<uint64_t> sums) {
  const auto size = static_cast<int64_t>(logits.size());
  const int64_t full = size / kLogitBlock, rest = size - full * kLogitBlock;
  const float* x = logits.data();
  switch (cpu_isa()) {
    case CpuIsa::kAvx512:
    case CpuIsa::kAmx:
      full_block_sums_avx512(x, full, max, inverse_temperature, sums.data());
      break;
    case CpuIsa::kAvx2:
      full_block_sums_avx2(x, full, max, inverse_temperature, sums.data());
      break;
    case CpuIsa::kScalar:
      for (int64_t b = 0; b < full; ++b) {
        sums[b] = block_sum_scalar(x + b * kLogitBlock, kLogitBlock, max, inverse_temperature);
      }
  }
  if (rest > 0) {
    sums[full] = block_sum_scalar(x + full * kLogitBlock, rest, max, inverse_temperature);
  }
  uint64_t total = 0;
  for (int64_t b = 0; b < num_logit_blocks(size); ++b) total += sums[b];
  return total;
}

}  // namespace fathom
