// Philox over a block's 16 groups of tokens, a group a lane of 64 bits: the multiplication of the
// lanes' low halves then gives both halves of a product, and what stands in a high half is never
// read.
#include "ops/sampling/noise_block.h"

// GCC 12 warns about the undefined operand inside its own AVX-512 intrinsics.
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

namespace fathom {
namespace {

uint64_t fill_scalar(const NoiseKey& key, int64_t block, uint32_t zeros, NoiseBlock& out) {
  uint64_t found = 0;
  for (int group = 0; group < NoiseBlock::kGroups; ++group) {
    const PhiloxWords words =
        noise_words(key, static_cast<uint32_t>(block * NoiseBlock::kGroups + group));
    for (int i = 0; i < kNoiseGroup; ++i) {
      const int lane = i * NoiseBlock::kGroups + group;
      out.lanes[lane] = words.words[i];
      found |= uint64_t{(words.words[i] & zeros) == 0} << lane;
    }
  }
  return found;
}

[[gnu::target("avx2")]] uint64_t fill_avx2(const NoiseKey& key, int64_t block, uint32_t zeros,
                                           NoiseBlock& out) {
  constexpr int kLanes = 4;
  const __m256i factor0 = _mm256_set1_epi64x(kPhiloxFactor0);
  const __m256i factor2 = _mm256_set1_epi64x(kPhiloxFactor2);
  const auto position = static_cast<int64_t>(key.position);
  __m256i least = _mm256_set1_epi32(-1);
  for (int first = 0; first < NoiseBlock::kGroups; first += kLanes) {
    __m256i c0 = _mm256_add_epi64(_mm256_set1_epi64x(block * NoiseBlock::kGroups + first),
                                  _mm256_set_epi64x(3, 2, 1, 0));
    __m256i c1 = _mm256_setzero_si256(), c2 = _mm256_set1_epi64x(position);
    __m256i c3 = _mm256_srli_epi64(c2, 32);
    auto key0 = static_cast<uint32_t>(key.stream), key1 = static_cast<uint32_t>(key.stream >> 32);
    for (int round = 0; round < kPhiloxRounds; ++round) {
      const __m256i product0 = _mm256_mul_epu32(c0, factor0);
      const __m256i product2 = _mm256_mul_epu32(c2, factor2);
      const __m256i with_key0 = _mm256_xor_si256(c1, _mm256_set1_epi64x(key0));
      const __m256i with_key1 = _mm256_xor_si256(c3, _mm256_set1_epi64x(key1));
      c0 = _mm256_xor_si256(_mm256_srli_epi64(product2, 32), with_key0);
      c1 = product2;
      c2 = _mm256_xor_si256(_mm256_srli_epi64(product0, 32), with_key1);
      c3 = product0;
      key0 += kPhiloxStep0;
      key1 += kPhiloxStep1;
    }
    const __m256i words[] = {c0, c1, c2, c3};
    for (int i = 0; i < kNoiseGroup; ++i) {
      uint64_t* const to = &out.lanes[i * NoiseBlock::kGroups + first];
      _mm256_store_si256(reinterpret_cast<__m256i*>(to), words[i]);
      least = _mm256_min_epu32(least, words[i]);
    }
  }
  const __m256i mask = _mm256_set1_epi64x(zeros);
  const auto lanes_found = [&](__m256i words) __attribute__((target("avx2"))) {
    const __m256i is_zero =
        _mm256_cmpeq_epi64(_mm256_and_si256(words, mask), _mm256_setzero_si256());
    return static_cast<uint64_t>(_mm256_movemask_pd(_mm256_castsi256_pd(is_zero)));
  };
  if (lanes_found(least) == 0) return 0;
  uint64_t found = 0;
  for (int lane = 0; lane < kLogitBlock; lane += kLanes) {
    const auto* const from = reinterpret_cast<const __m256i*>(&out.lanes[lane]);
    found |= lanes_found(_mm256_load_si256(from)) << lane;
  }
  return found;
}

[[gnu::target("avx512f")]] uint64_t fill_avx512(const NoiseKey& key, int64_t block, uint32_t zeros,
                                                NoiseBlock& out) {
  // Two vectors of eight groups: their rounds overlap.
  const __m512i factor0 = _mm512_set1_epi64(kPhiloxFactor0);
  const __m512i factor2 = _mm512_set1_epi64(kPhiloxFactor2);
  const __m512i lane = _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0);
  const int64_t first = block * NoiseBlock::kGroups;
  __m512i c0[] = {_mm512_add_epi64(_mm512_set1_epi64(first), lane),
                  _mm512_add_epi64(_mm512_set1_epi64(first + 8), lane)};
  const __m512i position = _mm512_set1_epi64(static_cast<int64_t>(key.position));
  __m512i c1[] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
  __m512i c2[] = {position, position};
  __m512i c3[] = {_mm512_srli_epi64(position, 32), _mm512_srli_epi64(position, 32)};
  auto key0 = static_cast<uint32_t>(key.stream), key1 = static_cast<uint32_t>(key.stream >> 32);
  constexpr int kXorOfThree = 0x96;
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const __m512i keys0 = _mm512_set1_epi64(key0), keys1 = _mm512_set1_epi64(key1);
    for (int v = 0; v < 2; ++v) {
      const __m512i product0 = _mm512_mul_epu32(c0[v], factor0);
      const __m512i product2 = _mm512_mul_epu32(c2[v], factor2);
      c0[v] = _mm512_ternarylogic_epi64(_mm512_srli_epi64(product2, 32), c1[v], keys0, kXorOfThree);
      c1[v] = product2;
      c2[v] = _mm512_ternarylogic_epi64(_mm512_srli_epi64(product0, 32), c3[v], keys1, kXorOfThree);
      c3[v] = product0;
    }
    key0 += kPhiloxStep0;
    key1 += kPhiloxStep1;
  }
  const __m512i words[] = {c0[0], c0[1], c1[0], c1[1], c2[0], c2[1], c3[0], c3[1]};
  __m512i least = words[0];
  for (size_t i = 0; i < 8; ++i) {
    _mm512_store_si512(&out.lanes[i * 8], words[i]);
    least = _mm512_min_epu32(least, words[i]);
  }
  const __m512i mask = _mm512_set1_epi64(zeros);
  if (_mm512_testn_epi64_mask(least, mask) == 0) return 0;
  uint64_t found = 0;
  for (int i = 0; i < 8; ++i) {
    found |= static_cast<uint64_t>(_mm512_testn_epi64_mask(words[i], mask)) << (i * 8);
  }
  return found;
}

}  // namespace

FillNoiseBlock fill_noise_block(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::kAvx512:
    case CpuIsa::kAmx:
      return fill_avx512;
    case CpuIsa::kAvx2:
      return fill_avx2;
    case CpuIsa::kScalar:
      break;
  }
  return fill_scalar;
}

}  // namespace fathom
