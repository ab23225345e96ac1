#include "tensor/quantize_weight.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "base/math.h"
#include "tensor/widen_row.h"

namespace fathom {
namespace {

constexpr uint32_t kMagnitude = 0x7FFFFFFF;
constexpr uint32_t kInfinityBits = 0x7F800000;

// Up to 128 weights of one row, in fp32.
using RowPiece = std::array<float, kScaleBlock>;

// to_e4m3() for magnitudes of up to about 448. Branch-free, so that the compiler vectorizes the
// loop around it.
uint8_t encode_e4m3(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & kMagnitude;
  // Drops 20 of 23 mantissa bits; the exponent's bias changes from 127 to 7.
  const uint32_t normal = ((magnitude + 0x7FFFF + (magnitude >> 20 & 1)) >> 20) - (120u << 3);
  // Below 2^-6 codes are multiples of 2^-9, which is the unit in the last place of 2^14.
  constexpr float kUnits = 16384.0f;
  const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + kUnits) -
                             std::bit_cast<uint32_t>(kUnits);
  constexpr int32_t kLeastNormal = 121 << 23;
  // Both are computed and one is masked out. Signed, because SSE2 and AVX2 have signed integer
  // comparisons only.
  const int32_t is_subnormal =
      -static_cast<int32_t>(static_cast<int32_t>(magnitude) < kLeastNormal);
  const auto code = static_cast<int32_t>(subnormal & static_cast<uint32_t>(is_subnormal)) |
                    (static_cast<int32_t>(normal) & ~is_subnormal);
  return static_cast<uint8_t>(std::min(code, 0x7E) | static_cast<int32_t>(bits >> 24 & 0x80));
}

// Compared as bits, which orders NaN above infinity above all numbers.
uint32_t largest_magnitude(const ConstTensorView& weights) {
  RowPiece row{};  // columns past the end stay 0
  int32_t largest = 0;
  for (int64_t r = 0; r < weights.size(0); ++r) {
    widen_row(weights, r, row.data());
    for (const float w : row) {
      largest = std::max(largest, static_cast<int32_t>(std::bit_cast<uint32_t>(w) & kMagnitude));
    }
  }
  return static_cast<uint32_t>(largest);
}

// The block of `matrix` at [row, col], up to 128x128.
template <bool kConst>
BasicTensorView<kConst> block_at(const BasicTensorView<kConst>& matrix, int64_t row, int64_t col) {
  return matrix.rows(row, std::min(kScaleBlock, matrix.size(0) - row))
      .columns(col, std::min(kScaleBlock, matrix.size(1) - col));
}

Result<> not_finite(const ConstTensorView& block, int64_t first_row, int64_t first_col) {
  RowPiece row{};
  for (int64_t r = 0; r < block.size(0); ++r) {
    widen_row(block, r, row.data());
    for (int64_t c = 0; c < block.size(1); ++c) {
      const float value = row[static_cast<size_t>(c)];
      if (std::isfinite(value)) continue;
      return invalid("holds {} at [{}, {}]; only finite weights can be quantised", value,
                     first_row + r, first_col + c);
    }
  }
  FATHOM_CHECK(false, "a block of finite weights has no finite scale");
}

}  // namespace

float quantize_weight_block(const ConstTensorView& weights, ScaleForm form,
                            const TensorView& values) {
  const int64_t rows = weights.size(0), cols = weights.size(1);
  FATHOM_CHECK(rows <= kScaleBlock && cols <= kScaleBlock && values.size(0) == rows &&
                   values.size(1) == cols,
               "a block {} to {}", weights.shape_string(), values.shape_string());
  const uint32_t magnitude = largest_magnitude(weights);
  if (magnitude >= kInfinityBits) return std::bit_cast<float>(magnitude);
  float scale = std::max(std::bit_cast<float>(magnitude), kLeastMagnitude) / kLargestE4M3;
  if (form == ScaleForm::kPowerOfTwo) scale = next_power_of_two(scale);
  RowPiece row{};
  std::array<uint8_t, kScaleBlock> codes;
  for (int64_t r = 0; r < rows; ++r) {
    widen_row(weights, r, row.data());
    for (size_t c = 0; c < row.size(); ++c) codes[c] = encode_e4m3(row[c] / scale);
    std::copy_n(codes.data(), cols, &values.row<e4m3>(r)->bits);
  }
  return scale;
}

Result<> quantize_weights(const ConstTensorView& weights, ScaleForm form, const TensorView& values,
                          const TensorView& scales, int64_t first_row) {
  const int64_t rows = weights.size(0), cols = weights.size(1);
  FATHOM_CHECK(values.size(0) == rows && values.size(1) == cols &&
                   scales.size(0) == ceil_div(rows, kScaleBlock) &&
                   scales.size(1) == ceil_div(cols, kScaleBlock),
               "weights {} to {} with scales {}", weights.shape_string(), values.shape_string(),
               scales.shape_string());
  for (int64_t row = 0; row < rows; row += kScaleBlock) {
    for (int64_t col = 0; col < cols; col += kScaleBlock) {
      const ConstTensorView block = block_at(weights, row, col);
      const float scale = quantize_weight_block(block, form, block_at(values, row, col));
      if (!std::isfinite(scale)) return not_finite(block, first_row + row, col);
      scales.row<float>(row / kScaleBlock)[col / kScaleBlock] = scale;
    }
  }
  return {};
}

}  // namespace fathom
