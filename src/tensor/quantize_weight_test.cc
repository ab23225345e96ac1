#include "tensor/quantize_weight.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "base/math.h"
#include "tensor/scaled_matrix.h"

namespace fathom {
namespace {

struct Quantized {
  Quantized(int64_t rows, int64_t cols)
      : values(static_cast<size_t>(rows * cols)),
        scales(static_cast<size_t>(ceil_div(rows, kScaleBlock) * ceil_div(cols, kScaleBlock))),
        values_view(values.data(), {rows, cols}),
        scales_view(scales.data(), {ceil_div(rows, kScaleBlock), ceil_div(cols, kScaleBlock)}) {}

  std::vector<e4m3> values;
  std::vector<float> scales;
  TensorView values_view, scales_view;
};

// Compares with the definition: dtype.h's conversion, element by element.
template <typename T>
void expect_defined(const std::vector<T>& weights, int64_t rows, int64_t cols, ScaleForm form) {
  Quantized out(rows, cols);
  ASSERT_TRUE(quantize_weights(ConstTensorView(weights.data(), {rows, cols}), form, out.values_view,
                               out.scales_view));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      float magnitude = kLeastMagnitude;
      const int64_t top = r / 128 * 128, left = c / 128 * 128;
      if (r == top && c == left) {
        for (int64_t i = top; i < std::min(top + 128, rows); ++i) {
          for (int64_t j = left; j < std::min(left + 128, cols); ++j) {
            magnitude = std::max(magnitude, std::abs(to_float(weights[i * cols + j])));
          }
        }
        float scale = magnitude / 448.0f;
        if (form == ScaleForm::kPowerOfTwo) scale = std::exp2(std::ceil(std::log2(scale)));
        ASSERT_EQ(out.scales_view.row<float>(r / 128)[c / 128], scale) << r << ", " << c;
      }
      const float scale = out.scales_view.row<float>(r / 128)[c / 128];
      const float value = to_float(weights[r * cols + c]) / scale;
      ASSERT_EQ(out.values[r * cols + c].bits, to_e4m3(value).bits) << r << ", " << c;
    }
  }
}

TEST(QuantizeWeight, IsAsDefinedForRaggedShapesAndAllTypes) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal(0, 0.02f);
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{128, 128},
                                   {576, 256},
                                   {1, 1},
                                   {129, 127},
                                   {40, 300},
                                   {300, 40}}) {
    for (const ScaleForm form : {ScaleForm::kF32, ScaleForm::kPowerOfTwo}) {
      std::vector<float> wide(static_cast<size_t>(rows * cols));
      // A wide range, so that subnormal e4m3 values and zeros occur.
      for (float& w : wide) w = normal(random) * std::exp2(static_cast<float>(random() % 16) - 15);
      std::vector<bf16> narrow;
      std::vector<f16> half;
      for (const float w : wide) {
        narrow.push_back(to_bf16(w));
        half.push_back(to_f16(w));
      }
      expect_defined(wide, rows, cols, form);
      expect_defined(narrow, rows, cols, form);
      expect_defined(half, rows, cols, form);
    }
  }
}

// Every bf16 in a block with scale 1: the conversion equals dtype.h's, including the signs of
// zeros.
TEST(QuantizeWeight, ConvertsEveryBf16AsDtypeDoes) {
  for (uint32_t first = 0; first < 65536; first += 127) {
    std::vector<bf16> weights{to_bf16(448.0f)};
    for (uint32_t bits = first; bits < first + 127; ++bits) {
      const bf16 value{static_cast<uint16_t>(bits)};
      weights.push_back(std::abs(to_float(value)) <= 448.0f ? value : bf16{0x8000});
    }
    std::vector<e4m3> values(128);
    ASSERT_EQ(quantize_weight_block(ConstTensorView(weights.data(), {1, 128}), ScaleForm::kF32,
                                    TensorView(values.data(), {1, 128})),
              1.0f);
    for (size_t i = 0; i < values.size(); ++i) {
      ASSERT_EQ(values[i].bits, to_e4m3(to_float(weights[i])).bits) << to_float(weights[i]);
    }
  }
}

TEST(QuantizeWeight, ABlockOfZerosIsZeros) {
  const std::vector<bf16> weights(128 * 128);
  Quantized out(128, 128);
  ASSERT_TRUE(quantize_weights(ConstTensorView(weights.data(), {128, 128}), ScaleForm::kF32,
                               out.values_view, out.scales_view));
  EXPECT_EQ(out.scales[0], 1e-30f / 448.0f);
  EXPECT_TRUE(std::isnormal(out.scales[0]));
  for (const e4m3 value : out.values) ASSERT_EQ(value.bits, 0);
}

TEST(QuantizeWeight, TheErrorIsHalfAStepAtMost) {
  std::mt19937 random(11);
  std::normal_distribution<float> normal(0, 1);
  std::vector<float> weights(256 * 256);
  for (float& w : weights) w = normal(random);
  Quantized out(256, 256);
  ASSERT_TRUE(quantize_weights(ConstTensorView(weights.data(), {256, 256}), ScaleForm::kF32,
                               out.values_view, out.scales_view));
  const ScaledMatrix matrix{out.values_view, out.scales_view, 128, 128};
  for (int64_t r = 0; r < 256; ++r) {
    for (int64_t c = 0; c < 256; ++c) {
      const float w = weights[r * 256 + c];
      // Half a unit in the last place of 4 bits, or half of the smallest subnormal.
      const float bound = std::max(std::abs(w) / 16, matrix.scale_at(r, c) / 1024) * 1.0001f;
      ASSERT_LE(std::abs(matrix.at(r, c) - w), bound);
    }
  }
}

TEST(QuantizeWeight, NamesTheWeightThatIsNotFinite) {
  for (const float bad :
       {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
        std::numeric_limits<float>::quiet_NaN()}) {
    std::vector<bf16> weights(200 * 200, to_bf16(1.0f));
    weights[150 * 200 + 131] = to_bf16(bad);
    Quantized out(200, 200);
    const auto result = quantize_weights(ConstTensorView(weights.data(), {200, 200}),
                                         ScaleForm::kF32, out.values_view, out.scales_view);
    ASSERT_FALSE(result);
    EXPECT_NE(result.error().message.find("at [150, 131]"), std::string::npos)
        << result.error().message;
    // The rows may be a part of a larger matrix.
    const auto of_piece =
        quantize_weights(ConstTensorView(weights.data(), {200, 200}), ScaleForm::kF32,
                         out.values_view, out.scales_view, /*first_row=*/1024);
    ASSERT_FALSE(of_piece);
    EXPECT_NE(of_piece.error().message.find("at [1174, 131]"), std::string::npos)
        << of_piece.error().message;
  }
}

}  // namespace
}  // namespace fathom
