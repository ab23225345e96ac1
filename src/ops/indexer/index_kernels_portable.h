// The inner loops of index scores in portable C++, in fp32: compiled unchanged for the scalar
// level, and once more with AVX2 and FMA. Everything is local to the including file.
#pragma once

#include <cstring>

#include "ops/indexer/index_kernels.h"

namespace fathom::cpu {
namespace {

float widen_bf16(uint16_t bits) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(bits) << 16);
}

// A code's magnitude, shifted to fp32's exponent and mantissa positions, is off by the difference
// of the exponent biases: a power of two that also corrects subnormal codes.
float widen_e4m3(uint8_t code) {
  const uint32_t magnitude = code & 0x7Fu;
  const float value = __builtin_bit_cast(float, magnitude << 20) * 0x1p120f;
  return magnitude == 0x7F ? __builtin_nanf("") : (code & 0x80u) != 0 ? -value : value;
}

float element(const void* values, IndexKeyFormat format, int64_t i) {
  switch (format) {
    case IndexKeyFormat::kE4M3:
      return widen_e4m3(static_cast<const uint8_t*>(values)[i]);
    case IndexKeyFormat::kBF16:
      return widen_bf16(static_cast<const uint16_t*>(values)[i]);
    case IndexKeyFormat::kF32:
      break;
  }
  return static_cast<const float*>(values)[i];
}

int64_t lanes_of(int64_t heads) { return (heads + kHeadLanes - 1) / kHeadLanes * kHeadLanes; }

void pack(const void* values, IndexKeyFormat format, int64_t head_stride, int64_t heads,
          int64_t dim, void* packed) {
  auto* out = static_cast<float*>(packed);
  for (int64_t first = 0; first < heads; first += kBlockHeads) {
    const int64_t left = heads - first < kBlockHeads ? heads - first : kBlockHeads;
    const int64_t lanes = lanes_of(left);
    for (int64_t i = 0; i < dim; ++i, out += lanes) {
      for (int64_t h = 0; h < lanes; ++h) {
        out[h] = h < left ? element(values, format, (first + h) * head_stride + i) : 0.0f;
      }
    }
  }
}

void decode_row(const std::byte* row, IndexKeyFormat format, int64_t dim, float* out,
                float* scale) {
  *scale = 1;
  switch (format) {
    case IndexKeyFormat::kE4M3:
      for (int64_t i = 0; i < dim; ++i) out[i] = widen_e4m3(static_cast<uint8_t>(row[i]));
      std::memcpy(scale, row + dim, sizeof *scale);
      return;
    case IndexKeyFormat::kBF16:
      for (int64_t i = 0; i < dim; ++i) {
        uint16_t bits = 0;
        std::memcpy(&bits, row + i * 2, sizeof bits);
        out[i] = widen_bf16(bits);
      }
      return;
    case IndexKeyFormat::kF32:
      std::memcpy(out, row, static_cast<size_t>(dim) * sizeof(float));
  }
}

void decode(const std::byte* rows, int64_t count, IndexKeyFormat format, int64_t dim, void* keys,
            float* scales) {
  const int64_t row_bytes = format == IndexKeyFormat::kE4M3   ? dim + 4
                            : format == IndexKeyFormat::kBF16 ? dim * 2
                                                              : dim * 4;
  for (int64_t i = 0; i < count; ++i) {
    decode_row(rows + i * row_bytes, format, dim, static_cast<float*>(keys) + i * dim, scales + i);
  }
}

void score(const void* packed, const float* weights, int64_t heads, const void* keys,
           const float* scales, int64_t num_keys, int64_t dim, float* scores) {
  for (int64_t key = 0; key < num_keys; ++key) {
    const float* k = static_cast<const float*>(keys) + key * dim;
    const auto* q = static_cast<const float*>(packed);
    float totals[kHeadLanes] = {};
    for (int64_t first = 0; first < heads; first += kBlockHeads) {
      const int64_t left = heads - first < kBlockHeads ? heads - first : kBlockHeads;
      const int64_t lanes = lanes_of(left);
      float sums[kBlockHeads] = {};
      for (int64_t i = 0; i < dim; ++i, q += lanes) {
        for (int64_t h = 0; h < lanes; ++h) sums[h] += k[i] * q[h];
      }
      for (int64_t h = 0; h < lanes; ++h) {
        // NaN is not below 0: it stays.
        totals[h % kHeadLanes] += weights[first + h] * (sums[h] < 0 ? 0.0f : sums[h]);
      }
    }
    for (int64_t width = kHeadLanes / 2; width > 0; width /= 2) {
      for (int64_t lane = 0; lane < width; ++lane) totals[lane] += totals[lane + width];
    }
    scores[key] = scales[key] * totals[0];
  }
}

constexpr IndexKernels kPortable = {
    .bf16_elements = false, .pack = pack, .decode = decode, .score = score};

}  // namespace
}  // namespace fathom::cpu
