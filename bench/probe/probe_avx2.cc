#include <immintrin.h>

#include "bench/probe/probe_kernels.h"

namespace fathom {
namespace {

uint64_t read(const std::byte* data, int64_t bytes) {
  __m256i sums[8];
#pragma GCC unroll 16
  for (auto& sum : sums) sum = _mm256_setzero_si256();
  for (int64_t at = 0; at < bytes; at += 256) {
    const auto* vectors = reinterpret_cast<const __m256i*>(data + at);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) sums[i] = _mm256_xor_si256(sums[i], _mm256_load_si256(vectors + i));
  }
#pragma GCC unroll 16
  for (auto& sum : sums) sums[0] = _mm256_xor_si256(sums[0], sum);
  return static_cast<uint64_t>(_mm256_extract_epi64(sums[0], 0));
}

constexpr int kChains = 12;

int64_t f32(int64_t count, float* out) {
  __m256 sums[kChains];
#pragma GCC unroll 16
  for (auto& sum : sums) sum = _mm256_set1_ps(out[0]);
  const __m256 factor = _mm256_set1_ps(0.999f);
  for (int64_t i = 0; i < count; ++i) {
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) {
      sums[c] = _mm256_fmadd_ps(sums[c], factor, factor);
      asm volatile("" : "+x"(sums[c]));
    }
  }
#pragma GCC unroll 16
  for (auto& sum : sums) out[0] += _mm256_cvtss_f32(sum);
  return kChains * 16;
}

}  // namespace

extern const ProbeKernels kProbeAvx2;
const ProbeKernels kProbeAvx2 = {read, f32, f32};

}  // namespace fathom
