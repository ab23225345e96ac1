// The inner loops of attention in portable C++, in fp32: compiled unchanged for the scalar level,
// and once more with AVX2 and FMA. Everything is local to the including file.
#pragma once

#include <cstring>

#include "ops/attention/cpu/attention_kernels.h"

namespace fathom::cpu {
namespace {

constexpr int64_t kLanes = 16;

float widen(uint16_t bits) { return __builtin_bit_cast(float, static_cast<uint32_t>(bits) << 16); }

void convert(const void* source, bool source_bf16, int64_t count, void* out) {
  auto* result = static_cast<float*>(out);
  if (!source_bf16) {
    std::memcpy(result, source, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  const auto* in = static_cast<const uint16_t*>(source);
  for (int64_t i = 0; i < count; ++i) result[i] = widen(in[i]);
}

// A code's magnitude, shifted to fp32's exponent and mantissa positions, is off by the difference
// of the exponent biases: a power of two that also corrects subnormal codes.
float decode_e4m3(uint8_t code) {
  const uint32_t magnitude = code & 0x7Fu;
  const float value = __builtin_bit_cast(float, magnitude << 20) * 0x1p120f;
  return magnitude == 0x7F ? __builtin_nanf("") : (code & 0x80u) != 0 ? -value : value;
}

float decode_e5m2(uint8_t code) {
  const uint32_t magnitude = code & 0x7Fu;
  const float finite = __builtin_bit_cast(float, magnitude << 21) * 0x1p112f;
  const float value = magnitude > 0x7C    ? __builtin_nanf("")
                      : magnitude == 0x7C ? __builtin_inff()
                                          : finite;
  return (code & 0x80u) != 0 ? -value : value;
}

void decode_fp8(const void* codes, bool e5m2, int64_t count, float scale, void* out) {
  const auto* in = static_cast<const uint8_t*>(codes);
  auto* result = static_cast<float*>(out);
  for (int64_t i = 0; i < count; ++i) {
    result[i] = (e5m2 ? decode_e5m2(in[i]) : decode_e4m3(in[i])) * scale;
  }
}

float dot(const float* a, const float* b, int64_t count) {
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += a[i + lane] * b[i + lane];
  }
  for (int64_t lane = 0; i < count; ++i, ++lane) lanes[lane] += a[i] * b[i];
  for (int64_t width = kLanes / 2; width > 0; width /= 2) {
    for (int64_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

void direct_scores(const void* q, int64_t q_stride, int64_t rows, const void* const* keys,
                   int64_t num_keys, int64_t dims, float* scores) {
  for (int64_t key = 0; key < num_keys; ++key) {
    const auto* k = static_cast<const float*>(keys[key]);
    for (int64_t row = 0; row < rows; ++row) {
      scores[row * kTileKeys + key] = dot(static_cast<const float*>(q) + row * q_stride, k, dims);
    }
  }
}

void direct_values(const void* p, int64_t rows, const void* const* values, int64_t num_keys,
                   int64_t value_dims, const float* rescale, float* out, int64_t out_stride) {
  for (int64_t row = 0; row < rows; ++row) {
    const float* weights = static_cast<const float*>(p) + row * kTileKeys;
    float* sum = out + row * out_stride;
    for (int64_t i = 0; i < value_dims; ++i) {
      sum[i] = rescale[row] == 0.0f ? 0.0f : sum[i] * rescale[row];
    }
    for (int64_t key = 0; key < num_keys; ++key) {
      const auto* v = static_cast<const float*>(values[key]);
      for (int64_t i = 0; i < value_dims; ++i) sum[i] += weights[key] * v[i];
    }
  }
}

// 2^x for x <= 0, relative error below 2e-7: x = n + r, |r| <= 1/2, and the polynomial of degree 6
// that is nearest to 2^r in relative error (Remez; 2e-9 before rounding).
float exp2_nonpositive(float x) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
  const float clamped = x > -126.0f ? x : -126.0f;
  const float n = (clamped + magic) - magic;
  const float r = clamped - n;
  float y = 0.000153458122f;
  y = y * r + 0.00133999312f;
  y = y * r + 0.00961848896f;
  y = y * r + 0.0555032878f;
  y = y * r + 0.240226469f;
  y = y * r + 0.693147206f;
  y = y * r + 1.0f;
  const auto power =
      __builtin_bit_cast(float, static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23);
  return x >= -126.0f ? y * power : 0.0f;
}

void softmax(const float* scores, int64_t rows, const int32_t* visible, float scale, float* max,
             float* sum, float* rescale, void* p) {
  for (int64_t row = 0; row < rows; ++row) {
    const float* in = scores + row * kTileKeys;
    float* out = static_cast<float*>(p) + row * kTileKeys;
    std::memset(out, 0, kTileKeys * sizeof(float));
    // -inf - -inf is NaN: the first tile of a row has nothing to rescale.
    const bool first = max[row] == -__builtin_inff();
    rescale[row] = first ? 0.0f : 1.0f;
    if (visible[row] <= 0) continue;
    float top = max[row];
    for (int64_t key = 0; key < visible[row]; ++key) {
      const float value = in[key] * scale;
      top = value > top ? value : top;
    }
    if (!first) rescale[row] = exp2_nonpositive(max[row] - top);
    max[row] = top;
    float total = 0;
    for (int64_t key = 0; key < visible[row]; ++key)
      out[key] = exp2_nonpositive(in[key] * scale - top);
    for (int64_t key = 0; key < visible[row]; ++key) total += out[key];
    sum[row] = sum[row] * rescale[row] + total;
  }
}

uint16_t narrow(float value) {
  const auto bits = __builtin_bit_cast(uint32_t, value);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

void merge(const float* sums, int64_t part_stride, int64_t parts, const float* weights,
           int64_t count, bool out_bf16, void* out) {
  for (int64_t i = 0; i < count; ++i) {
    float value = 0;
    for (int64_t part = 0; part < parts; ++part) {
      value += weights[part] * sums[part * part_stride + i];
    }
    if (out_bf16) {
      static_cast<uint16_t*>(out)[i] = narrow(value);
    } else {
      static_cast<float*>(out)[i] = value;
    }
  }
}

// Packed keys: [dims][kTileKeys]. Packed values: [kTileKeys][value_dims padded].
int64_t padded(int64_t dims) { return (dims + kValuePadding - 1) / kValuePadding * kValuePadding; }

int64_t packed_keys_bytes(int64_t dims) { return (dims + 1) * kTileKeys * 4; }
int64_t packed_values_bytes(int64_t dims) { return padded(dims) * kTileKeys * 4; }

float element(const void* rows, bool rows_bf16, int64_t i) {
  return rows_bf16 ? widen(static_cast<const uint16_t*>(rows)[i])
                   : static_cast<const float*>(rows)[i];
}

void pack_keys(const void* rows, int64_t stride, bool rows_bf16, int64_t num_keys, int64_t first,
               int64_t dims, void* packed) {
  auto* out = static_cast<float*>(packed) + first * kTileKeys;
  for (int64_t i = 0; i < dims; ++i) {
    for (int64_t key = 0; key < kTileKeys; ++key) {
      out[i * kTileKeys + key] = key < num_keys ? element(rows, rows_bf16, key * stride + i) : 0.0f;
    }
  }
}

void pack_values(const void* rows, int64_t stride, bool rows_bf16, int64_t num_keys, int64_t dims,
                 void* packed) {
  auto* out = static_cast<float*>(packed);
  const int64_t columns = padded(dims);
  std::memset(out, 0, static_cast<size_t>(packed_values_bytes(dims)));
  for (int64_t key = 0; key < num_keys; ++key) {
    for (int64_t i = 0; i < dims; ++i) {
      out[key * columns + i] = element(rows, rows_bf16, key * stride + i);
    }
  }
}

void packed_scores(const void* q, int64_t q_stride, int64_t rows, const void* packed, int64_t dims,
                   float* scores) {
  const auto* k = static_cast<const float*>(packed);
  for (int64_t row = 0; row < rows; ++row) {
    const float* query = static_cast<const float*>(q) + row * q_stride;
    float sums[kTileKeys] = {};
    for (int64_t i = 0; i < dims; ++i) {
      for (int64_t key = 0; key < kTileKeys; ++key) sums[key] += query[i] * k[i * kTileKeys + key];
    }
    std::memcpy(scores + row * kTileKeys, sums, sizeof sums);
  }
}

void packed_values(const void* p, int64_t rows, const void* packed, int64_t num_keys,
                   int64_t value_dims, const float* rescale, float* out, int64_t out_stride) {
  const auto* v = static_cast<const float*>(packed);
  const int64_t columns = padded(value_dims);
  for (int64_t row = 0; row < rows; ++row) {
    const float* weights = static_cast<const float*>(p) + row * kTileKeys;
    for (int64_t first = 0; first < columns; first += kValuePadding) {
      float sums[kValuePadding] = {};
      for (int64_t key = 0; key < num_keys; ++key) {
        for (int64_t i = 0; i < kValuePadding; ++i) {
          sums[i] += weights[key] * v[key * columns + first + i];
        }
      }
      float* result = out + row * out_stride + first;
      for (int64_t i = 0; i < kValuePadding; ++i) {
        result[i] = (rescale[row] == 0.0f ? 0.0f : result[i] * rescale[row]) + sums[i];
      }
    }
  }
}

constexpr AttentionKernels kPortable = {
    .bf16_elements = false,
    .strip_rows = 24,
    .convert = convert,
    .decode_fp8 = decode_fp8,
    .direct_scores = direct_scores,
    .direct_values = direct_values,
    .softmax = softmax,
    .merge = merge,
    .packed_keys_bytes = packed_keys_bytes,
    .packed_values_bytes = packed_values_bytes,
    .pack_keys = pack_keys,
    .pack_values = pack_values,
    .packed_scores = packed_scores,
    .packed_values = packed_values,
};

}  // namespace
}  // namespace fathom::cpu
