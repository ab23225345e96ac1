#include "ops/convert/convert.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "base/random.h"

namespace fathom {
namespace {

// The nearest bf16 of two neighbours, ties to even: compares distances in double.
float nearest_bf16(float value) {
  const float below = to_float(bf16{static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16)});
  const float above =
      to_float(bf16{static_cast<uint16_t>((std::bit_cast<uint32_t>(value) >> 16) + 1)});
  const double to_below = std::abs(static_cast<double>(value) - below);
  const double to_above = std::abs(static_cast<double>(value) - above);
  if (to_below != to_above) return to_below < to_above ? below : above;
  return std::bit_cast<uint32_t>(value) >> 16 & 1 ? above : below;
}

TEST(Convert, RoundsToNearestEvenAndBack) {
  ThreadPool pool(3);
  const Stream stream(pool);
  for (const int64_t rows : {1, 5, 600}) {
    constexpr int64_t kHeads = 3;
    constexpr int64_t kN = 37;
    constexpr int64_t kStride = 40;  // strided in both leading dimensions
    std::vector<float> x(static_cast<size_t>(rows * kHeads * kStride));
    for (size_t i = 0; i < x.size(); ++i) {
      x[i] = static_cast<float>(random_uniform(1, 2, i) * 8 - 4);
      if (i % 5 == 0) x[i] = 1 + static_cast<float>(i % 64) / 256;  // exact ties
    }
    std::vector<bf16> narrow(static_cast<size_t>(rows * kHeads * kN + 1), bf16{0xFFFF});
    const ConstTensorView wide = ConstTensorView(x.data(), {rows, kHeads, kStride}).columns(0, kN);
    convert(stream, wide, TensorView(narrow.data(), {rows, kHeads, kN}));
    EXPECT_EQ(narrow.back().bits, 0xFFFF);
    std::vector<float> back(x.size(), 1e30f);
    convert(stream, ConstTensorView(narrow.data(), {rows, kHeads, kN}),
            TensorView(back.data(), {rows, kHeads, kStride}).columns(0, kN));
    for (int64_t row = 0; row < rows * kHeads; ++row) {
      for (int64_t i = 0; i < kN; ++i) {
        const float expected = nearest_bf16(x[row * kStride + i]);
        ASSERT_EQ(to_float(narrow[row * kN + i]), expected) << x[row * kStride + i];
        ASSERT_EQ(back[row * kStride + i], expected);
      }
      EXPECT_EQ(back[row * kStride + kN], 1e30f);
    }
  }
}

TEST(Convert, RankTwoOfTheSameTypeIsACopy) {
  ThreadPool pool(1);
  const std::vector<float> x = {1, 2, 3, 4, 5, 6};
  std::vector<float> out(6, 0.0f);
  convert(Stream(pool), ConstTensorView(x.data(), {2, 3}), TensorView(out.data(), {2, 3}));
  EXPECT_EQ(out, x);
}

}  // namespace
}  // namespace fathom
