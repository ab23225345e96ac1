#include "ops/draft_head/draft_head.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "base/random.h"
#include "ops/draft_head/draft_head_kernels.h"

namespace fathom {
namespace {

std::vector<float> random_floats(uint64_t key, int64_t count) {
  std::vector<float> values(static_cast<size_t>(count));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>(random_uniform(key, 0, i) - 0.5);
  }
  return values;
}

ScaledMatrix unscaled(ConstTensorView values) {
  ScaledMatrix matrix;
  matrix.values = values;
  return matrix;
}

std::vector<float> product(const std::vector<float>& x, const std::vector<float>& weights,
                           int64_t rows, int64_t cols, int threads = 1) {
  DraftHead head = *DraftHead::allocate(rows, cols, "test");
  head.pack(unscaled(ConstTensorView(weights.data(), {rows, cols})));
  const int64_t count = std::ssize(x) / cols;
  std::vector<float> out(static_cast<size_t>(count * rows), -7.0f);
  std::vector<std::byte> scratch(static_cast<size_t>(draft_scratch_bytes(count, cols)));
  ThreadPool pool(threads);
  approximate_logits(Stream(pool), ConstTensorView(x.data(), {count, cols}), head, scratch,
                     TensorView(out.data(), {count, rows}));
  return out;
}

// A code is off by at most half a step, so a product by x * step of w / 2 + w * step of x / 2 +
// both.
TEST(DraftHead, IsAsNearAsItsCodesAllow) {
  for (const auto& [rows, cols] :
       {std::pair<int64_t, int64_t>{1, 1}, {63, 5}, {200, 256}, {65, 130}}) {
    for (const int64_t count : {1, 2, 3, 4, 5, 9}) {
      const std::vector<float> x = random_floats(1, count * cols);
      const std::vector<float> weights = random_floats(2, rows * cols);
      const std::vector<float> out = product(x, weights, rows, cols, 3);
      for (int64_t r = 0; r < count; ++r) {
        const float* const xs = x.data() + r * cols;
        float most_x = 0;
        for (int64_t c = 0; c < cols; ++c) most_x = std::max(most_x, std::abs(xs[c]));
        for (int64_t w = 0; w < rows; ++w) {
          const float* const ws = weights.data() + w * cols;
          float most_w = 0;
          for (int64_t c = 0; c < cols; ++c) most_w = std::max(most_w, std::abs(ws[c]));
          const double step_x = most_x / 127 / 2, step_w = most_w / 63 / 2;
          double exact = 0, bound = 1e-6;
          for (int64_t c = 0; c < cols; ++c) {
            exact += double{xs[c]} * ws[c];
            bound += std::abs(xs[c]) * step_w + std::abs(ws[c]) * step_x + step_x * step_w;
          }
          ASSERT_NEAR(out[static_cast<size_t>(r * rows + w)], exact, 1.0001 * bound)
              << rows << " x " << cols << ", row " << r << " of " << count << ", weight " << w;
        }
      }
    }
  }
}

// The largest sums of two products, too: AVX2 keeps them in 16 bits.
TEST(DraftHead, EveryLevelHasTheSumsOfIntegers) {
  constexpr int64_t kSteps = 33;
  for (const bool is_extreme : {false, true}) {
    std::vector<uint8_t> x(kMostRows * kSteps * kStepColumns);
    std::vector<int8_t> panel(kPanelRows * kSteps * kStepColumns);
    for (size_t i = 0; i < x.size(); ++i) {
      x[i] = is_extreme ? 255 : static_cast<uint8_t>(1 + random_bits(1, 0, i) % 255);
    }
    for (size_t i = 0; i < panel.size(); ++i) {
      const auto drawn = static_cast<int>(random_bits(2, 0, i) % (2 * kMaxCode + 1)) - kMaxCode;
      const int extreme = i / size_t{kStepColumns} % 2 == 0 ? kMaxCode : -kMaxCode;
      panel[i] = static_cast<int8_t>(is_extreme ? extreme : drawn);
    }
    for (const CpuIsa isa : runnable_levels()) {
      for (int rows = 1; rows <= kMostRows; ++rows) {
        std::vector<int32_t> sums(kMostRows * kPanelRows, 12345);
        panel_sums(isa)(x.data(), rows, panel.data(), kSteps, sums.data());
        for (int r = 0; r < kMostRows; ++r) {
          for (int i = 0; i < kPanelRows; ++i) {
            int64_t sum = r < rows ? 0 : 12345;
            for (int64_t c = 0; r < rows && c < kSteps * kStepColumns; ++c) {
              const int64_t at = c / kStepColumns * kPanelRows * kStepColumns + i * kStepColumns +
                                 c % kStepColumns;
              const int product = panel[static_cast<size_t>(at)] *
                                  x[static_cast<size_t>(r * kSteps * kStepColumns + c)];
              sum += product;
            }
            ASSERT_EQ(sums[static_cast<size_t>(r * kPanelRows + i)], sum)
                << name_of(isa) << ", row " << r << " of " << rows << ", weight " << i;
          }
        }
      }
    }
  }
}

TEST(DraftHead, ValuesThatAreNotFiniteGiveFiniteLogits) {
  constexpr int64_t kRows = 70, kCols = 12;
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (const float bad : {kInf, -kInf, std::numeric_limits<float>::quiet_NaN()}) {
    std::vector<float> x = random_floats(1, 2 * kCols), weights = random_floats(2, kRows * kCols);
    const std::vector<float> good = product(x, weights, kRows, kCols);
    x[3] = bad;
    weights[66 * kCols + 5] = bad;
    const std::vector<float> out = product(x, weights, kRows, kCols);
    for (size_t i = 0; i < out.size(); ++i) {
      EXPECT_TRUE(std::isfinite(out[i])) << i;
      const bool is_of_bad_weights = i % kRows == 66;
      if (is_of_bad_weights || i >= kRows) {
        EXPECT_EQ(out[i], is_of_bad_weights ? 0 : good[i]) << i;
      }
    }
  }
}

TEST(DraftHead, TakesBf16AndSharesItsMemory) {
  constexpr int64_t kRows = 130, kCols = 64;
  std::vector<float> x = random_floats(1, 3 * kCols), weights = random_floats(2, kRows * kCols);
  std::vector<bf16> narrow_x, narrow_weights;
  for (float& value : x) value = to_float(narrow_x.emplace_back(to_bf16(value)));
  for (float& value : weights) value = to_float(narrow_weights.emplace_back(to_bf16(value)));
  DraftHead head = *DraftHead::allocate(kRows, kCols, "test");
  const DraftHead shared = head.share();
  head.pack(unscaled(ConstTensorView(narrow_weights.data(), {kRows, kCols})));
  std::vector<float> out(3 * kRows);
  std::vector<std::byte> scratch(static_cast<size_t>(draft_scratch_bytes(3, kCols)));
  ThreadPool pool(1);
  approximate_logits(Stream(pool), ConstTensorView(narrow_x.data(), {3, kCols}), shared, scratch,
                     TensorView(out.data(), {3, kRows}));
  EXPECT_EQ(out, product(x, weights, kRows, kCols));
  EXPECT_EQ(shared.bytes(), 192 * 64 + 192 * 8);
}

}  // namespace
}  // namespace fathom
