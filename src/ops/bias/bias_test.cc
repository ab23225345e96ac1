#include "ops/bias/bias.h"

#include <gtest/gtest.h>

#include <vector>

#include "base/random.h"

namespace fathom {
namespace {

TEST(AddBias, AddsToEachRowAndNothingBeside) {
  ThreadPool pool(3);
  for (const int64_t rows : {1, 3, 2000}) {
    constexpr int64_t kN = 37, kStride = 41;
    std::vector<float> x(static_cast<size_t>(rows * kStride)), bias(kN);
    for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(random_uniform(1, 0, i) - 0.5);
    for (size_t i = 0; i < bias.size(); ++i) bias[i] = static_cast<float>(random_uniform(2, 0, i));
    const std::vector<float> before = x;
    add_bias(Stream(pool), ConstTensorView(bias.data(), {kN}),
             TensorView(x.data(), {rows, kStride}).columns(2, kN));
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t i = 0; i < kStride; ++i) {
        const auto at = static_cast<size_t>(row * kStride + i);
        const bool inside = i >= 2 && i < 2 + kN;
        ASSERT_EQ(x[at], before[at] + (inside ? bias[static_cast<size_t>(i - 2)] : 0.0f));
      }
    }
  }
}

}  // namespace
}  // namespace fathom
