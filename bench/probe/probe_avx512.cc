#include <immintrin.h>

#include "bench/probe/probe_kernels.h"

namespace fathom {
namespace {

uint64_t read(const std::byte* data, int64_t bytes) {
  __m512i sums[16];
#pragma GCC unroll 16
  for (auto& sum : sums) sum = _mm512_setzero_si512();
  for (int64_t at = 0; at < bytes; at += 1024) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      sums[i] = _mm512_xor_si512(sums[i], _mm512_load_si512(data + at + 64 * i));
    }
  }
#pragma GCC unroll 16
  for (auto& sum : sums) sums[0] = _mm512_xor_si512(sums[0], sum);
  return static_cast<uint64_t>(_mm512_reduce_or_epi64(sums[0]));
}

// 16 chains hide the latency; the factors are below one, so that the sums stay finite.
constexpr int kChains = 16;

int64_t bf16(int64_t count, float* out) {
  __m512 sums[kChains];
#pragma GCC unroll 16
  for (auto& sum : sums) sum = _mm512_set1_ps(out[0]);
  const __m512i factor = _mm512_set1_epi32(0x3C233C23);
  for (int64_t i = 0; i < count; ++i) {
#pragma GCC unroll 16
    for (int c = 0; c < kChains; ++c) {
      sums[c] = _mm512_dpbf16_ps(sums[c], (__m512bh)factor, (__m512bh)factor);
      asm volatile("" : "+v"(sums[c]));
    }
  }
#pragma GCC unroll 16
  for (auto& sum : sums) out[0] += _mm512_reduce_add_ps(sum);
  return kChains * 64;
}

int64_t f32(int64_t count, float* out) {
  __m512 sums[kChains];
#pragma GCC unroll 16
  for (auto& sum : sums) sum = _mm512_set1_ps(out[0]);
  const __m512 factor = _mm512_set1_ps(0.999f);
  for (int64_t i = 0; i < count; ++i) {
#pragma GCC unroll 16
    for (int c = 0; c < kChains; ++c) {
      sums[c] = _mm512_fmadd_ps(sums[c], factor, factor);
      asm volatile("" : "+v"(sums[c]));
    }
  }
#pragma GCC unroll 16
  for (auto& sum : sums) out[0] += _mm512_reduce_add_ps(sum);
  return kChains * 32;
}

}  // namespace

extern const ProbeKernels kProbeAvx512;
const ProbeKernels kProbeAvx512 = {read, bf16, f32};

}  // namespace fathom
