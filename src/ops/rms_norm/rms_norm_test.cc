#include "ops/rms_norm/rms_norm.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "base/random.h"

namespace fathom {
namespace {

// rows x n values inside rows of `stride`, in type T; the gaps are NaN.
template <typename T>
std::vector<T> random_rows(int64_t rows, int64_t n, int64_t stride, uint64_t seed) {
  std::vector<T> values(static_cast<size_t>(rows * stride));
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < stride; ++i) {
      const double value = i < n ? 4 * random_uniform(seed, row, i) - 1.5 : std::nan("");
      T& out = values[static_cast<size_t>(row * stride + i)];
      if constexpr (std::is_same_v<T, bf16>) {
        out = to_bf16(static_cast<float>(value));
      } else {
        out = static_cast<float>(value);
      }
    }
  }
  return values;
}

template <typename In, typename Out>
void expect_norm(int64_t rows, int64_t n, int threads) {
  SCOPED_TRACE(testing::Message() << rows << " x " << n << ", " << threads << " threads");
  ThreadPool pool(threads);
  const Stream stream(pool);
  const int64_t stride = n + 3;
  const std::vector<In> x = random_rows<In>(rows, n, stride, 7);
  const std::vector<float> weight = random_rows<float>(1, n, n, 8);
  constexpr float kEps = 1e-6f;
  std::vector<Out> out(static_cast<size_t>(rows * n + 1));
  std::memset(static_cast<void*>(out.data()), 0xFF, out.size() * sizeof(Out));
  const ConstTensorView view = ConstTensorView(x.data(), {rows, stride}).columns(0, n);
  rms_norm(stream, view, ConstTensorView(weight.data(), {n}), kEps,
           TensorView(out.data(), {rows, n}));
  EXPECT_TRUE(std::isnan(to_float(out.back())));
  const double relative = std::is_same_v<Out, bf16> ? 0x1p-8 : 2e-6;
  for (int64_t row = 0; row < rows; ++row) {
    double squares = 0;
    for (int64_t i = 0; i < n; ++i) {
      squares += std::pow(static_cast<double>(to_float(x[row * stride + i])), 2);
    }
    const double scale = 1 / std::sqrt(squares / static_cast<double>(n) + kEps);
    for (int64_t i = 0; i < n; ++i) {
      const double expected = weight[i] * to_float(x[row * stride + i]) * scale;
      ASSERT_NEAR(to_float(out[row * n + i]), expected, std::abs(expected) * relative + 1e-30);
    }
  }
  std::vector<Out> again(out.size());
  std::memset(static_cast<void*>(again.data()), 0xFF, again.size() * sizeof(Out));
  rms_norm(stream, view, ConstTensorView(weight.data(), {n}), kEps,
           TensorView(again.data(), {rows, n}));
  EXPECT_EQ(std::memcmp(out.data(), again.data(), out.size() * sizeof(Out)), 0);
}

TEST(RmsNorm, MatchesDoublePrecision) {
  for (const int threads : {1, 3}) {
    for (const auto& [rows, n] : {std::pair<int64_t, int64_t>{1, 256},
                                  {0, 64},
                                  {1, 1},
                                  {7, 99},
                                  {129, 512},
                                  {3, 7168},
                                  {5, 15}}) {
      expect_norm<float, float>(rows, n, threads);
      expect_norm<float, bf16>(rows, n, threads);
      expect_norm<bf16, float>(rows, n, threads);
      expect_norm<bf16, bf16>(rows, n, threads);
    }
  }
}

TEST(RmsNorm, ZeroRowStaysZero) {
  ThreadPool pool(1);
  const std::vector<float> x(64, 0.0f);
  const std::vector<float> weight(64, 2.0f);
  std::vector<float> out(64, 1e30f);
  rms_norm(Stream(pool), ConstTensorView(x.data(), {1, 64}), ConstTensorView(weight.data(), {64}),
           1e-6f, TensorView(out.data(), {1, 64}));
  for (const float value : out) EXPECT_EQ(value, 0);
}

}  // namespace
}  // namespace fathom
