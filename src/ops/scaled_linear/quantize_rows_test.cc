#include "ops/scaled_linear/quantize_rows.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

namespace fathom {
namespace {

std::vector<bf16> random_block(float deviation, std::mt19937& random) {
  std::normal_distribution<float> normal(0, deviation);
  std::vector<bf16> block(kScaleBlock);
  for (bf16& value : block) value = to_bf16(normal(random));
  return block;
}

TEST(QuantizeRows, ValuesComeBackWithinHalfAStep) {
  std::mt19937 random(1);
  for (const ScaleForm form : {ScaleForm::kF32, ScaleForm::kPowerOfTwo}) {
    for (const float deviation : {1e-20f, 1e-3f, 1.0f, 3e4f}) {
      const auto x = random_block(deviation, random);
      std::vector<e4m3> values(x.size());
      const float scale = quantize_block(x, form, values);
      for (size_t i = 0; i < x.size(); ++i) {
        // Three mantissa bits after the leading one: 2^-4 of the value; for subnormals half of
        // 2^-9.
        const float exact = to_float(x[i]);
        EXPECT_NEAR(to_float(values[i]) * scale, exact,
                    std::abs(exact) / 16 * 1.0001f + scale / 1024 * 1.0001f);
      }
    }
  }
}

TEST(QuantizeRows, TheLargestBecomesTheLargest) {
  std::mt19937 random(2);
  auto x = random_block(1, random);
  x[77] = to_bf16(-9.5f);
  std::vector<e4m3> values(x.size());
  EXPECT_EQ(quantize_block(x, ScaleForm::kF32, values), 9.5f / 448);
  EXPECT_EQ(to_float(values[77]), -448.0f);
}

TEST(QuantizeRows, PowersOfTwoAreTheNextOnes) {
  std::vector<bf16> x(kScaleBlock);
  std::vector<e4m3> values(x.size());
  x[0] = to_bf16(448.0f);
  EXPECT_EQ(quantize_block(x, ScaleForm::kPowerOfTwo, values), 1.0f);
  x[0] = to_bf16(450.0f);
  EXPECT_EQ(quantize_block(x, ScaleForm::kPowerOfTwo, values), 2.0f);
  EXPECT_EQ(to_float(values[0]), 224.0f);  // 225 between 224 and 240
}

TEST(QuantizeRows, AGivenScaleIsKeptTo) {
  std::vector<bf16> x(kScaleBlock);
  std::vector<e4m3> values(x.size());
  x[0] = to_bf16(3.0f);
  x[1] = to_bf16(-300.0f);  // beyond 448 * 0.5
  quantize_block(x, 0.5f, values);
  EXPECT_EQ(to_float(values[0]), 6.0f);
  EXPECT_EQ(to_float(values[1]), -448.0f);
  EXPECT_EQ(to_float(values[2]), 0.0f);
}

TEST(QuantizeRows, ZerosStayZerosWithAScale) {
  const std::vector<bf16> x(kScaleBlock);
  std::vector<e4m3> values(x.size(), e4m3{0x55});
  EXPECT_EQ(quantize_block(x, ScaleForm::kF32, values), kLeastMagnitude / 448);
  for (const e4m3 value : values) EXPECT_EQ(value.bits, 0);
}

}  // namespace
}  // namespace fathom
