// GEMMs of many rows on the GPU against double precision.
#include "ops/linear/many_rows_cuda.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "device/cuda/device_array.h"
#include "device/cuda/launch.h"
#include "device/cuda/random_data.h"

namespace fathom::cuda {
namespace {

constexpr uint16_t kNan = 0x7FC0;

struct Case {
  int rows, n, k, batches = 1;
  DType out_type = DType::kBF16;
  int gap = 0;  // between rows of x and of out
};

// Values on the host; x's rows beyond `rows` do not exist, gaps hold NaN.
class Product {
 public:
  explicit Product(const Case& c)
      : case_(c),
        x_stride_(c.k + c.gap),
        out_stride_(c.n + c.gap),
        x_host_(static_cast<size_t>(c.batches) * c.rows * x_stride_, kNan) {
    std::mt19937 random(static_cast<uint32_t>(c.rows * 31 + c.n * 7 + c.k));
    for (size_t row = 0; row * x_stride_ < x_host_.size(); ++row) {
      const auto values = random_bf16(c.k, 1, random);
      std::memcpy(x_host_.data() + row * x_stride_, values.data(), values.size() * 2);
    }
    weight_host_ = random_bf16(int64_t{c.batches} * c.n * c.k, 0.05f, random);
    x_ = DeviceArray<uint16_t>(x_host_);
    weight_ = DeviceArray<uint16_t>(weight_host_);
    out_ = DeviceArray<uint8_t>(out_elements() * size_of(c.out_type));
  }

  LinearArguments arguments() const {
    return {.x = x_.data(),
            .x_row_stride = x_stride_,
            .x_batch_stride = case_.rows * x_stride_,
            .weight = weight_.data(),
            .out = out_.data(),
            .out_row_stride = out_stride_,
            .out_batch_stride = case_.rows * out_stride_,
            .out_type = case_.out_type,
            .rows = case_.rows,
            .n = case_.n,
            .k = case_.k,
            .batches = case_.batches};
  }

  bool can_take(const ManyRowsTile& tile) const {
    return can_be_planned(problem(), tile, DeviceContext::current().num_multiprocessors());
  }

  // Bytes of the result, which is poisoned first.
  std::vector<uint8_t> run(const ManyRowsTile* tile) const {
    check(cudaMemset(out_.data(), 0xFF, out_.bytes()), "poison");
    if (tile == nullptr) {
      linear_many_rows(arguments(), nullptr);
    } else {
      linear_many_rows(
          arguments(),
          plan_many_rows(problem(), *tile, DeviceContext::current().num_multiprocessors()),
          nullptr);
    }
    check(cudaDeviceSynchronize(), "synchronize");
    return out_.to_host();
  }

  void compare(const std::vector<uint8_t>& bytes) const {
    for (int64_t i = 0; i < out_elements(); ++i) {
      const bool in_gap = i % out_stride_ >= case_.n;
      const float value = element(bytes, i);
      ASSERT_EQ(std::isnan(value), in_gap) << "element " << i;
    }
    std::mt19937 random(1);
    const int64_t elements = int64_t{case_.batches} * case_.rows * case_.n;
    const int64_t samples = std::min<int64_t>(elements, 20000);
    double error = 0, norm = 0, worst = 0;
    for (int64_t s = 0; s < samples; ++s) {
      const int64_t e = samples == elements ? s : static_cast<int64_t>(random()) % elements;
      const int64_t column = e % case_.n, row = e / case_.n, batch = row / case_.rows;
      const uint16_t* x = x_host_.data() + row * x_stride_;
      const uint16_t* w = weight_host_.data() + (batch * case_.n + column) * case_.k;
      double sum = 0;
      for (int i = 0; i < case_.k; ++i) sum += double{from_bf16(x[i])} * from_bf16(w[i]);
      const double off = element(bytes, row * out_stride_ + column) - sum;
      error += off * off;
      norm += sum * sum;
      worst = std::max(worst, std::abs(off));
    }
    const double root = std::sqrt(norm / static_cast<double>(samples));
    const bool f32 = case_.out_type == DType::kF32;
    EXPECT_LE(std::sqrt(error / norm), f32 ? 1e-5 : 2e-3) << name();
    EXPECT_LE(worst / root, f32 ? 1e-4 : 2e-2) << name();
  }

  std::string name() const {
    return std::to_string(case_.rows) + " x " + std::to_string(case_.n) + " x " +
           std::to_string(case_.k) + ", " + std::to_string(case_.batches) + " batches";
  }

 private:
  ManyRowsProblem problem() const {
    return {.rows = case_.rows, .n = case_.n, .k = case_.k, .batches = case_.batches};
  }
  int64_t out_elements() const { return int64_t{case_.batches} * case_.rows * out_stride_; }
  float element(const std::vector<uint8_t>& bytes, int64_t i) const {
    if (case_.out_type == DType::kF32) {
      float value;
      std::memcpy(&value, bytes.data() + i * 4, 4);
      return value;
    }
    uint16_t bits;
    std::memcpy(&bits, bytes.data() + i * 2, 2);
    return from_bf16(bits);
  }

  Case case_;
  int64_t x_stride_, out_stride_;
  std::vector<uint16_t> x_host_, weight_host_;
  DeviceArray<uint16_t> x_, weight_;
  DeviceArray<uint8_t> out_;
};

class ManyRows : public testing::TestWithParam<Case> {};

TEST_P(ManyRows, EqualsDoublePrecisionWithAnyTile) {
  const Product product(GetParam());
  product.compare(product.run(nullptr));
  std::vector<std::vector<uint8_t>> unsplit;
  for (const ManyRowsTile& tile : many_rows_tiles()) {
    if (!product.can_take(tile)) continue;
    SCOPED_TRACE(product.name() + ", tile " + std::to_string(tile.rows()) + " x " +
                 std::to_string(tile.columns) + ", split " + std::to_string(tile.split));
    const auto out = product.run(&tile);
    product.compare(out);
    EXPECT_EQ(product.run(&tile), out);
    if (tile.split == 1) unsplit.push_back(out);
  }
  // All tiles add an element's products in the same order.
  for (const auto& out : unsplit) EXPECT_EQ(out, unsplit.front()) << product.name();
}

INSTANTIATE_TEST_SUITE_P(Shapes, ManyRows,
                         testing::Values(Case{65, 8, 64}, Case{64, 64, 64}, Case{1, 256, 128},
                                         Case{100, 72, 128}, Case{129, 576, 192},
                                         Case{127, 2112, 512}, Case{200, 264, 2048},
                                         Case{1000, 520, 1408}, Case{511, 3648, 2048},
                                         Case{512, 2048, 2048}, Case{300, 2048, 10944},
                                         Case{2048, 4096, 512}, Case{70, 102400, 64}));
INSTANTIATE_TEST_SUITE_P(Strided, ManyRows,
                         testing::Values(Case{100, 72, 128, 1, DType::kBF16, 8},
                                         Case{333, 512, 128, 16, DType::kBF16, 64},
                                         Case{333, 128, 512, 16, DType::kBF16, 24},
                                         Case{65, 200, 64, 3, DType::kBF16, 0}));
INSTANTIATE_TEST_SUITE_P(Fp32, ManyRows,
                         testing::Values(Case{65, 8, 64, 1, DType::kF32},
                                         Case{129, 328, 256, 2, DType::kF32, 8},
                                         Case{257, 1000, 2048, 1, DType::kF32},
                                         Case{512, 8192, 256, 1, DType::kF32}));

// Small shapes for racecheck, which takes a minute.
TEST(ManyRowsShort, EqualsDoublePrecision) {
  const Product product({65, 72, 64});
  product.compare(product.run(&many_rows_tiles().front()));
}

TEST(ManyRowsRepeat, SameBitsTwentyTimes) {
  const Product product({777, 3648, 2048});
  const auto first = product.run(nullptr);
  for (int i = 0; i < 20; ++i) EXPECT_EQ(product.run(nullptr), first) << "launch " << i;
}

// Launches of a stream overlap: each must wait for what it reads and writes.
TEST(ManyRowsChain, EachLaunchWaitsForTheOneBefore) {
  constexpr int kSize = 512, kLaunches = 8;
  std::mt19937 random(3);
  const DeviceArray<uint16_t> weight(random_bf16(kSize * kSize, 1.0f / 22.6f, random));
  const auto x = random_bf16(kSize * kSize, 1, random);
  const auto run = [&](bool wait) {
    DeviceArray<uint16_t> from(x), to(kSize * kSize);
    check(cudaMemset(to.data(), 0xFF, to.bytes()), "poison");
    for (int i = 0; i < kLaunches; ++i) {
      linear_many_rows({.x = from.data(),
                        .x_row_stride = kSize,
                        .weight = weight.data(),
                        .out = to.data(),
                        .out_row_stride = kSize,
                        .rows = kSize,
                        .n = kSize,
                        .k = kSize},
                       nullptr);
      if (wait) check(cudaDeviceSynchronize(), "synchronize");
      std::swap(from, to);
    }
    check(cudaDeviceSynchronize(), "synchronize");
    return from.to_host();
  };
  const auto expected = run(true);
  for (int i = 0; i < 20; ++i) EXPECT_EQ(run(false), expected) << "chain " << i;
}

}  // namespace
}  // namespace fathom::cuda
