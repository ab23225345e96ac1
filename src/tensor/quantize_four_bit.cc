#include "tensor/quantize_four_bit.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "tensor/widen_row.h"

namespace fathom {
namespace {

constexpr float kLargestInt = 7;
constexpr float kLargestE2m1 = 6;
// So that neither a scale nor a quotient leaves fp32.
constexpr float kLeastScale = 1e-30f;
constexpr int kLeastExponent = -126;

// To nearest even for magnitudes below 2^22, without a call.
float round_even(float value) {
  constexpr float kUnits = 12582912.0f;  // 1.5 * 2^23
  return (value + kUnits) - kUnits;
}

uint8_t encode_e2m1(float value) {
  const float size = std::fabs(value);
  const int code = (size > 0.25f) + (size >= 0.75f) + (size > 1.25f) + (size >= 1.75f) +
                   (size > 2.5f) + (size >= 3.5f) + (size > 5.0f);
  return static_cast<uint8_t>(code | (std::signbit(value) ? 8 : 0));
}

float quantize_int4(const float* values, int64_t count, float largest, uint8_t* codes) {
  const float scale =
      largest == 0 ? 1.0f : to_float(to_bf16(std::max(largest / kLargestInt, kLeastScale)));
  for (int64_t i = 0; i < count; ++i) {
    const float level = std::clamp(round_even(values[i] / scale), -kLargestInt, kLargestInt);
    codes[i] = static_cast<uint8_t>(static_cast<int>(level) + kSymmetricZero);
  }
  return scale;
}

double squared_error(const float* values, int64_t count, float scale) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int code = encode_e2m1(values[i] / scale);
    const double error = values[i] - four_bit_value(FourBitCode::kE2m1, code, 0) * scale;
    sum += error * error;
  }
  return sum;
}

float quantize_mxfp4(const float* values, int64_t count, float largest, uint8_t* codes) {
  float scale = 1;
  if (largest > 0) {
    const int exponent = std::max(std::ilogb(largest) - 2, kLeastExponent);
    scale = std::ldexp(1.0f, exponent);
    if (largest > kLargestE2m1 * scale &&
        squared_error(values, count, 2 * scale) < squared_error(values, count, scale)) {
      scale *= 2;
    }
  }
  for (int64_t i = 0; i < count; ++i) codes[i] = encode_e2m1(values[i] / scale);
  return scale;
}

}  // namespace

Result<> quantize_four_bit(const ConstTensorView& weights, FourBitCode code, int64_t group_cols,
                           std::span<uint8_t> codes, std::span<float> scales, int64_t first_row) {
  const int64_t rows = weights.size(0), cols = weights.size(1);
  FATHOM_CHECK(cols % group_cols == 0 && group_cols % 2 == 0 &&
                   std::ssize(codes) == rows * cols / 2 &&
                   std::ssize(scales) == rows * cols / group_cols,
               "weights {} in groups of {}", weights.shape_string(), group_cols);
  std::vector<float> row(static_cast<size_t>(cols));
  std::vector<uint8_t> wide(static_cast<size_t>(cols));
  for (int64_t r = 0; r < rows; ++r) {
    widen_row(weights, r, row.data());
    for (int64_t c = 0; c < cols; c += group_cols) {
      const float* const group = row.data() + c;
      float largest = 0;
      for (int64_t i = 0; i < group_cols; ++i) {
        if (!std::isfinite(group[i])) {
          return invalid("holds {} at [{}, {}]; only finite weights can be quantised", group[i],
                         first_row + r, c + i);
        }
        largest = std::max(largest, std::fabs(group[i]));
      }
      const auto quantize = code == FourBitCode::kE2m1 ? quantize_mxfp4 : quantize_int4;
      scales[static_cast<size_t>((r * cols + c) / group_cols)] =
          quantize(group, group_cols, largest, wide.data() + c);
    }
    uint8_t* const out = codes.data() + r * cols / 2;
    for (int64_t c = 0; c < cols; c += 2) {
      out[c / 2] = static_cast<uint8_t>(wide[c] | wide[c + 1] << 4);
    }
  }
  return {};
}

}  // namespace fathom
