// What: the inner loops of attention for AVX-512, in bf16 (vdpbf16ps: two multiply-adds a lane, or
// FMAs) and in fp32.
//
// Inputs, outputs: attention_kernels.h. Layout: attention_avx512_direct.h (the cache in place; by
// FMAs attention_avx512_fma.h) and attention_avx512_packed.h (packed tiles).
//
// Determinism: a sum's order depends on the dimensions and the number of keys in the tile only, not
// on how many rows are computed together.
//
// Measured, one Zen 4 core at 3.67 GHz (bf16 dot products 235 GFLOP/s), 64 keys, data in L2, best
// of many: direct 4 rows scores 1.6 us = 187 GFLOP/s, values 1.3 us = 206; packed 24 rows of 192 +
// 128 scores 2.55 us = 231 GFLOP/s, values 1.8 us = 216, softmax 0.59 us, packing 1.0 us a tile.
#include <immintrin.h>

#include "ops/attention/cpu/attention_avx512_direct.h"
#include "ops/attention/cpu/attention_avx512_fma.h"
#include "ops/attention/cpu/attention_avx512_packed.h"
#include "ops/attention/cpu/attention_kernels.h"

namespace fathom::cpu {
namespace {

// --- Conversions

template <typename T>
void convert(const void* source, bool source_bf16, int64_t count, void* out) {
  if (source_bf16 == T::kBf16) {
    __builtin_memcpy(out, source, static_cast<size_t>(count) * 4 / T::kPerWord);
    return;
  }
  for (int64_t i = 0; i < count; i += kWords) {
    const int64_t left = count - i;
    const __m512 value =
        source_bf16 ? widen(_mm256_maskz_loadu_epi16(mask32(left),
                                                     static_cast<const uint16_t*>(source) + i))
                    : _mm512_maskz_loadu_ps(mask32(left), static_cast<const float*>(source) + i);
    store_elements<T>(value, i, left, out);
  }
}

// A code's magnitude, shifted to fp32's exponent and mantissa positions, is off by the difference
// of the exponent biases: a power of two that also corrects subnormal codes.
__m512 decode16(__m128i codes, bool e5m2) {
  const __m512i wide = _mm512_cvtepu8_epi32(codes);
  const __m512i magnitude = _mm512_and_si512(wide, _mm512_set1_epi32(0x7F));
  const __m512i sign = _mm512_slli_epi32(_mm512_and_si512(wide, _mm512_set1_epi32(0x80)), 24);
  const __m512i nan = _mm512_set1_epi32(0x7FC00000);
  __m512i value;
  if (e5m2) {
    value = _mm512_castps_si512(_mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(magnitude, 21)),
                                              _mm512_set1_ps(0x1p112f)));
    value =
        _mm512_mask_mov_epi32(value, _mm512_cmpeq_epi32_mask(magnitude, _mm512_set1_epi32(0x7C)),
                              _mm512_set1_epi32(0x7F800000));
    value = _mm512_mask_mov_epi32(value,
                                  _mm512_cmpgt_epi32_mask(magnitude, _mm512_set1_epi32(0x7C)), nan);
  } else {
    value = _mm512_castps_si512(_mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(magnitude, 20)),
                                              _mm512_set1_ps(0x1p120f)));
    value = _mm512_mask_mov_epi32(value,
                                  _mm512_cmpeq_epi32_mask(magnitude, _mm512_set1_epi32(0x7F)), nan);
  }
  return _mm512_castsi512_ps(_mm512_or_si512(value, sign));
}

// 32 e4m3 codes to bf16, times factor / 2^120: the same in 16-bit lanes, where shifted codes are
// bf16.
__m512i decode32_e4m3(__m256i codes, __m512 factor) {
  const __m512i wide = _mm512_cvtepu8_epi16(codes);
  const __m512i magnitude = _mm512_slli_epi16(_mm512_and_si512(wide, _mm512_set1_epi16(0x7F)), 4);
  const __m512i sign = _mm512_slli_epi16(_mm512_and_si512(wide, _mm512_set1_epi16(0x80)), 8);
  const __mmask32 nan = _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x7F << 4));
  const __m512i bits = _mm512_or_si512(magnitude, sign);
  const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
  const __m512 odd =
      _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xFFFF0000))));
  const auto halves =
      (__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps(odd, factor), _mm512_mul_ps(even, factor));
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24,
                                         8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_mask_mov_epi16(_mm512_permutexvar_epi16(order, halves), nan,
                               _mm512_set1_epi16(0x7FC0));
}

template <typename T>
void decode_fp8(const void* codes, bool e5m2, int64_t count, float scale, void* out) {
  const __m512 factor = _mm512_set1_ps(scale);
  int64_t i = 0;
  if constexpr (T::kBf16) {
    const float shifted = scale * 0x1p120f;  // infinite for scales that no sane block has
    if (!e5m2 && shifted < __builtin_inff()) {
      for (; i + 32 <= count; i += 32) {
        const __m256i in = _mm256_loadu_si256(
            reinterpret_cast<const __m256i*>(static_cast<const uint8_t*>(codes) + i));
        _mm512_storeu_si512(static_cast<uint16_t*>(out) + i,
                            decode32_e4m3(in, _mm512_set1_ps(shifted)));
      }
    }
  }
  for (; i < count; i += kWords) {
    const int64_t left = count - i;
    const __m128i in = _mm_maskz_loadu_epi8(mask32(left), static_cast<const uint8_t*>(codes) + i);
    store_elements<T>(_mm512_mul_ps(decode16(in, e5m2), factor), i, left, out);
  }
}

// --- Softmax and combine

// 2^x for x <= 0, relative error below 2e-7: x = n + r, |r| <= 1/2, and the polynomial of degree 6
// that is nearest to 2^r in relative error (Remez; 2e-9 before rounding). Far below the range the
// result is 0.
inline __attribute__((always_inline)) __m512 exp2_nonpositive(__m512 x) {
  const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 r = _mm512_sub_ps(x, n);
  __m512 y = _mm512_set1_ps(0.000153458122f);
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(0.00133999312f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(0.00961848896f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(0.0555032878f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(0.240226469f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(0.693147206f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(y, n);
}

float exp2_nonpositive(float x) { return _mm512_cvtss_f32(exp2_nonpositive(_mm512_set1_ps(x))); }

template <typename T>
void softmax(const float* scores, int64_t rows, const int32_t* visible, float scale, float* max,
             float* sum, float* rescale, void* p) {
  const __m512 lowest = _mm512_set1_ps(-__builtin_inff());
  for (int64_t row = 0; row < rows; ++row) {
    auto* out = static_cast<uint32_t*>(p) + row * (kTileKeys / T::kPerWord);
    // -inf - -inf is NaN: the first tile of a row has nothing to rescale.
    const bool first = max[row] == -__builtin_inff();
    rescale[row] = first ? 0.0f : 1.0f;
    if (visible[row] <= 0) {
      for (int64_t i = 0; i < kTileKeys / T::kPerWord; i += kWords) {
        _mm512_storeu_si512(out + i, _mm512_setzero_si512());
      }
      continue;
    }
    __m512 value[4];
    __mmask16 seen[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      seen[i] = mask32(visible[row] - i * kWords);
      value[i] = _mm512_mask_mul_ps(lowest, seen[i], _mm512_set1_ps(scale),
                                    _mm512_loadu_ps(scores + row * kTileKeys + i * kWords));
    }
    const __m512 highest =
        _mm512_max_ps(_mm512_max_ps(value[0], value[1]), _mm512_max_ps(value[2], value[3]));
    const float here = _mm512_reduce_max_ps(highest);
    const float top = here > max[row] ? here : max[row];
    if (!first) rescale[row] = exp2_nonpositive(max[row] - top);
    max[row] = top;
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      value[i] = _mm512_maskz_mov_ps(
          seen[i], exp2_nonpositive(_mm512_sub_ps(value[i], _mm512_set1_ps(top))));
    }
    const __m512 total =
        _mm512_add_ps(_mm512_add_ps(value[0], value[1]), _mm512_add_ps(value[2], value[3]));
    sum[row] = sum[row] * rescale[row] + _mm512_reduce_add_ps(total);
    if constexpr (T::kBf16) {
      _mm512_storeu_si512(out, (__m512i)_mm512_cvtne2ps_pbh(value[1], value[0]));
      _mm512_storeu_si512(out + kWords, (__m512i)_mm512_cvtne2ps_pbh(value[3], value[2]));
    } else {
      for (int i = 0; i < 4; ++i) _mm512_storeu_ps(out + i * kWords, value[i]);
    }
  }
}

void merge(const float* sums, int64_t part_stride, int64_t parts, const float* weights,
           int64_t count, bool out_bf16, void* out) {
  for (int64_t i = 0; i < count; i += kWords) {
    const int64_t left = count - i;
    __m512 value = _mm512_setzero_ps();
    for (int64_t part = 0; part < parts; ++part) {
      value = _mm512_fmadd_ps(_mm512_set1_ps(weights[part]),
                              _mm512_maskz_loadu_ps(mask32(left), sums + part * part_stride + i),
                              value);
    }
    if (out_bf16) {
      store_elements<Bf16>(value, i, left, out);
    } else {
      store_elements<F32>(value, i, left, out);
    }
  }
}

template <typename T>
constexpr AttentionKernels kernels_of() {
  return {
      .bf16_elements = T::kBf16,
      .strip_rows = 4 * kPackedRows,
      .convert = convert<T>,
      .decode_fp8 = decode_fp8<T>,
      .direct_scores = direct_scores<T>,
      .direct_values = direct_values<T>,
      .softmax = softmax<T>,
      .merge = merge,
      .packed_keys_bytes = packed_keys_bytes<T>,
      .packed_values_bytes = packed_values_bytes<T>,
      .pack_keys = pack_keys<T>,
      .pack_values = pack_values<T>,
      .packed_scores = packed_scores<T>,
      .packed_values = packed_values<T>,
  };
}

// Calls a loop of Bf16ByFma with subnormals as vdpbf16ps has them.
template <auto kLoop, typename... Arguments>
void run_by_fma(Arguments... arguments) {
  const FlushToZero zero;
  kLoop(arguments...);
}

constexpr AttentionKernels kernels_by_fma() {
  AttentionKernels kernels = kernels_of<Bf16>();
  kernels.direct_scores = fma_direct_scores;
  kernels.direct_values = fma_direct_values;
  kernels.packed_scores = run_by_fma<packed_scores<Bf16ByFma>>;
  kernels.packed_values = run_by_fma<packed_values<Bf16ByFma>>;
  return kernels;
}

}  // namespace

const AttentionKernels kAvx512Attention = kernels_of<F32>();
const AttentionKernels kAvx512Bf16Attention = kernels_of<Bf16>();
const AttentionKernels kAvx512Bf16FmaAttention = kernels_by_fma();

}  // namespace fathom::cpu
