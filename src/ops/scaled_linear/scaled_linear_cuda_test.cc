// Scaled GEMMs and quantisation on the GPU, against double precision and the host.
#include "ops/scaled_linear/scaled_linear_cuda.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <string>

#include "base/math.h"
#include "device/cuda/device_array.h"
#include "device/cuda/launch.h"
#include "device/cuda/random_data.h"
#include "ops/linear/few_rows_cuda.h"
#include "ops/scaled_linear/quantize_rows_cuda.h"
#include "ops/scaled_linear/scaled_few_rows_cuda.h"
#include "ops/scaled_linear/scaled_many_rows_cuda.h"

namespace fathom::cuda {
namespace {

constexpr uint8_t kNanE4M3 = 0x7F;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// ---- quantize_rows

struct QuantizeCase {
  int rows, k;
  ScaleForm form = ScaleForm::kF32;
  float deviation = 1;
  float fixed_scale = 0;
};

class QuantizeRowsOnTheGpu : public testing::TestWithParam<QuantizeCase> {};

TEST_P(QuantizeRowsOnTheGpu, HasTheBitsOfTheHost) {
  const auto [rows, k, form, deviation, fixed_scale] = GetParam();
  const int64_t x_stride = k + 24, blocks = ceil_div(k, kScaleBlock);
  const int64_t values_stride = blocks * kScaleBlock + 16, scales_stride = round_up(rows, 4) + 4;
  std::mt19937 random(static_cast<uint32_t>(rows * 7 + k));
  auto x = random_bf16(rows * x_stride, deviation, random);
  for (int64_t i = 0; i < std::ssize(x); ++i) {
    if (i % x_stride >= k) x[static_cast<size_t>(i)] = 0x7FC0;
    if (i % x_stride < kScaleBlock && i / x_stride == rows / 2) x[static_cast<size_t>(i)] = 0;
  }
  const DeviceArray<uint16_t> x_there(x);
  const DeviceArray<uint8_t> values(rows * values_stride);
  const DeviceArray<float> scales(blocks * scales_stride);
  check(cudaMemset(values.data(), 0xAA, values.bytes()), "poison");
  check(cudaMemset(scales.data(), 0xFF, scales.bytes()), "poison");
  quantize_rows({.x = x_there.data(),
                 .x_row_stride = x_stride,
                 .values = values.data(),
                 .values_row_stride = values_stride,
                 .scales = scales.data(),
                 .scales_block_stride = scales_stride,
                 .rows = rows,
                 .k = k,
                 .form = form,
                 .fixed_scale = fixed_scale},
                nullptr);
  check(cudaDeviceSynchronize(), "synchronize");
  const auto got = values.to_host();
  const auto got_scales = scales.to_host();
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t begin = block * kScaleBlock, count = std::min(kScaleBlock, k - begin);
      std::vector<bf16> here(static_cast<size_t>(kScaleBlock));
      for (int64_t i = 0; i < count; ++i) {
        here[static_cast<size_t>(i)] = {x[static_cast<size_t>(row * x_stride + begin + i)]};
      }
      std::vector<e4m3> expected(here.size());
      float scale = fixed_scale;
      if (fixed_scale == 0) {
        scale = quantize_block(here, form, expected);
      } else {
        quantize_block(here, fixed_scale, expected);
      }
      ASSERT_EQ(got_scales[static_cast<size_t>(block * scales_stride + row)], scale)
          << "row " << row << ", block " << block;
      ASSERT_EQ(
          std::memcmp(got.data() + row * values_stride + begin, expected.data(), expected.size()),
          0)
          << "row " << row << ", block " << block;
    }
    for (int64_t i = blocks * kScaleBlock; i < values_stride; ++i) {
      ASSERT_EQ(got[static_cast<size_t>(row * values_stride + i)], 0xAA);
    }
  }
  for (int64_t i = 0; i < std::ssize(got_scales); ++i) {
    if (i % scales_stride >= rows) {
      ASSERT_TRUE(std::isnan(got_scales[static_cast<size_t>(i)]));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, QuantizeRowsOnTheGpu,
                         testing::Values(QuantizeCase{1, 7168}, QuantizeCase{3, 1536},
                                         QuantizeCase{17, 128},
                                         QuantizeCase{64, 2048, ScaleForm::kPowerOfTwo},
                                         QuantizeCase{100, 10944}, QuantizeCase{5, 8},
                                         QuantizeCase{513, 16384, ScaleForm::kPowerOfTwo, 300},
                                         QuantizeCase{9, 512, ScaleForm::kF32, 1e-25f},
                                         QuantizeCase{70, 1536, ScaleForm::kF32, 1, 0.0021f},
                                         QuantizeCase{33, 576, ScaleForm::kPowerOfTwo, 1e-33f}));

// ---- GEMMs

struct Case {
  int rows, n, k;
  int gap = 0;  // between rows of x (in 16 bytes) and of out (in 8 elements)
  bool positive =
      false;  // no negative values: sums grow, and so do rounding errors of short accumulators
  bool row_scales = false;
  DType out_type = DType::kBF16;
};

using Multiply = std::function<void(const ScaledLinearArguments&)>;

class Product {
 public:
  explicit Product(const Case& c)
      : case_(c),
        x_stride_(c.k + 16 * c.gap),
        scales_stride_(round_up(c.rows, 4) + 4 * c.gap),
        out_stride_(c.n + 8 * c.gap) {
    std::mt19937 random(static_cast<uint32_t>(c.rows * 31 + c.n * 7 + c.k + c.gap));
    x_host_.resize(static_cast<size_t>(c.rows * x_stride_), kNanE4M3);
    for (int64_t row = 0; row < c.rows; ++row) {
      const auto values = random_e4m3(c.k, random);
      std::memcpy(x_host_.data() + row * x_stride_, values.data(), values.size());
    }
    weight_host_ = random_e4m3(int64_t{c.n} * c.k, random);
    std::uniform_real_distribution<float> exponent(-9, -4);
    x_scales_host_.resize(static_cast<size_t>(blocks() * scales_stride_), kNan);
    for (int64_t i = 0; i < std::ssize(x_scales_host_); ++i) {
      if (i % scales_stride_ < c.rows) {
        x_scales_host_[static_cast<size_t>(i)] = std::exp2(exponent(random));
      }
    }
    weight_scales_host_.resize(static_cast<size_t>(ceil_div(c.n, 128) * blocks()));
    for (float& scale : weight_scales_host_) scale = std::exp2(exponent(random));
    if (c.row_scales) {
      row_scales_host_.resize(static_cast<size_t>(c.n));
      for (float& scale : row_scales_host_) scale = std::exp2(exponent(random));
      row_scales_ = DeviceArray<float>(row_scales_host_);
    }
    weight_ = DeviceArray<uint8_t>(weight_host_);
    weight_scales_ = DeviceArray<float>(weight_scales_host_);
    out_ = DeviceArray<uint8_t>(c.rows * out_stride_ * (c.out_type == DType::kF32 ? 4 : 2));
    upload_x();
  }

  // Sets row `row` of x to NaN.
  void spoil(int row) {
    std::memset(x_host_.data() + row * x_stride_, kNanE4M3, static_cast<size_t>(case_.k));
    upload_x();
  }

  // The bits of the first `rows` rows of the result as fp32; the output is poisoned first.
  std::vector<uint32_t> run(const Multiply& multiply) const { return run(multiply, case_.rows); }
  std::vector<uint32_t> run(const Multiply& multiply, int rows) const {
    check(cudaMemset(out_.data(), 0xFF, out_.bytes()), "poison");
    multiply({.x = x_.data(),
              .x_row_stride = x_stride_,
              .x_scales = x_scales_.data(),
              .x_scales_stride = scales_stride_,
              .weight = weight_.data(),
              .weight_scales = weight_scales_.data(),
              .weight_row_scales = case_.row_scales ? row_scales_.data() : nullptr,
              .out = out_.data(),
              .out_row_stride = out_stride_,
              .out_type = case_.out_type,
              .rows = rows,
              .n = case_.n,
              .k = case_.k});
    check(cudaDeviceSynchronize(), "synchronize");
    const auto bytes = out_.to_host();
    std::vector<uint32_t> bits(static_cast<size_t>(rows * out_stride_));
    for (size_t i = 0; i < bits.size(); ++i) {
      if (case_.out_type == DType::kF32) {
        std::memcpy(&bits[i], bytes.data() + 4 * i, 4);
      } else {
        std::memcpy(reinterpret_cast<uint8_t*>(&bits[i]) + 2, bytes.data() + 2 * i, 2);
      }
    }
    return bits;
  }

  void compare(const std::vector<uint32_t>& out) const {
    for (int64_t i = 0; i < std::ssize(out); ++i) {
      ASSERT_EQ(std::isnan(value(out, i)), i % out_stride_ >= case_.n) << "element " << i;
    }
    std::mt19937 random(1);
    const int64_t elements = int64_t{case_.rows} * case_.n;
    const int64_t samples = std::min<int64_t>(elements, 2'000'000 / case_.k);
    double error = 0, norm = 0, worst = 0;
    for (int64_t s = 0; s < samples; ++s) {
      const int64_t e = samples == elements ? s : static_cast<int64_t>(random()) % elements;
      const int64_t column = e % case_.n, row = e / case_.n;
      const double exact = element(row, column);
      const double off = value(out, row * out_stride_ + column) - exact;
      error += off * off;
      norm += exact * exact;
      worst = std::max(worst, std::abs(off) - std::abs(exact) / 256);
    }
    // bf16 rounds by 2^-8 at most; the tensor cores drop bits below 2^-13 of a sum's largest term.
    EXPECT_LE(std::sqrt(error / norm), 2e-3);
    EXPECT_LE(worst / std::sqrt(norm / static_cast<double>(samples)), 2e-3);
  }

  std::string name() const {
    return std::to_string(case_.rows) + " x " + std::to_string(case_.n) + " x " +
           std::to_string(case_.k);
  }

 private:
  static float value(const std::vector<uint32_t>& out, int64_t i) {
    return std::bit_cast<float>(out[static_cast<size_t>(i)]);
  }

  int64_t blocks() const { return case_.k / 128; }

  std::vector<uint8_t> random_e4m3(int64_t count, std::mt19937& random) const {
    // 256 normal numbers: four for each random one.
    std::vector<uint8_t> some(256);
    for (uint8_t& value : some) {
      const float wide = random_f32(1, 60, random)[0];
      value = to_e4m3(case_.positive ? std::abs(wide) : wide).bits;
    }
    std::vector<uint8_t> values(static_cast<size_t>(count));
    for (size_t i = 0; i < values.size(); i += 4) {
      auto bits = static_cast<uint32_t>(random());
      for (size_t j = i; j < std::min(i + 4, values.size()); ++j, bits >>= 8) {
        values[j] = some[bits & 255];
      }
    }
    return values;
  }

  void upload_x() {
    x_ = DeviceArray<uint8_t>(x_host_);
    x_scales_ = DeviceArray<float>(x_scales_host_);
  }

  double element(int64_t row, int64_t column) const {
    const uint8_t* x = x_host_.data() + row * x_stride_;
    const uint8_t* w = weight_host_.data() + column * case_.k;
    double sum = 0;
    for (int64_t block = 0; block < blocks(); ++block) {
      double products = 0;
      for (int64_t i = block * 128; i < (block + 1) * 128; ++i) {
        products += to_float(e4m3{x[i]}) * to_float(e4m3{w[i]});  // exact in fp32
      }
      sum += products * x_scales_host_[static_cast<size_t>(block * scales_stride_ + row)] *
             weight_scales_host_[static_cast<size_t>(column / 128 * blocks() + block)];
    }
    return case_.row_scales ? sum * row_scales_host_[static_cast<size_t>(column)] : sum;
  }

  Case case_;
  int64_t x_stride_, scales_stride_, out_stride_;
  std::vector<uint8_t> x_host_, weight_host_;
  std::vector<float> x_scales_host_, weight_scales_host_, row_scales_host_;
  DeviceArray<uint8_t> x_, weight_, out_;
  DeviceArray<float> x_scales_, weight_scales_, row_scales_;
};

class ScaledManyRows : public testing::TestWithParam<Case> {};

TEST_P(ScaledManyRows, EqualsDoublePrecisionWithAnyTile) {
  const Product product(GetParam());
  const ManyRowsProblem problem = {.rows = GetParam().rows,
                                   .n = GetParam().n,
                                   .k = GetParam().k,
                                   .type = ManyRowsType::kScaledE4M3};
  {
    SCOPED_TRACE(product.name());
    product.compare(
        product.run([](const ScaledLinearArguments& a) { scaled_linear_many_rows(a, nullptr); }));
  }
  std::vector<uint32_t> unsplit;
  for (const ManyRowsTile& tile : many_rows_tiles(ManyRowsType::kScaledE4M3)) {
    if (!can_be_planned(problem, tile, DeviceContext::current().num_multiprocessors())) continue;
    SCOPED_TRACE(product.name() + ", tile " + std::to_string(tile.rows()) + " x " +
                 std::to_string(tile.columns) + ", split " + std::to_string(tile.split));
    const Multiply multiply = [&](const ScaledLinearArguments& a) {
      scaled_linear_many_rows(
          a, plan_many_rows(problem, tile, DeviceContext::current().num_multiprocessors()),
          nullptr);
    };
    const auto out = product.run(multiply);
    EXPECT_EQ(product.run(multiply), out);
    // All tiles add an element's blocks in the same order.
    if (tile.split == 1 && !unsplit.empty()) {
      EXPECT_EQ(out, unsplit);
      continue;
    }
    product.compare(out);
    if (tile.split == 1) unsplit = out;
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, ScaledManyRows,
                         testing::Values(Case{65, 8, 128}, Case{64, 64, 128}, Case{1, 256, 256},
                                         Case{100, 72, 256, 1}, Case{129, 576, 384, 2},
                                         Case{127, 2112, 512}, Case{200, 264, 2048, 1},
                                         Case{1000, 520, 1408}, Case{511, 3648, 2048},
                                         Case{512, 2112, 7168}, Case{300, 2048, 11008},
                                         Case{2048, 4096, 512}, Case{70, 24576, 128},
                                         Case{300, 520, 1408, 1, false, true},
                                         Case{257, 2112, 512, 0, false, false, DType::kF32},
                                         Case{90, 328, 2048, 1, false, true, DType::kF32},
                                         Case{333, 1000, 16384, 1, true}));

TEST(ScaledManyRowsPadding, ChangesNoOtherRow) {
  Product product({200, 520, 1024});
  const Multiply multiply = [](const ScaledLinearArguments& a) {
    scaled_linear_many_rows(a, nullptr);
  };
  const auto before = product.run(multiply);
  product.spoil(77);
  const auto after = product.run(multiply);
  for (size_t i = 0; i < before.size(); ++i) {
    if (i / 520 == 77) continue;
    ASSERT_EQ(before[i], after[i]) << i;
  }
}

TEST(ScaledManyRowsRepeat, SameBitsTwentyTimes) {
  const Product product({777, 3648, 2048});
  const Multiply multiply = [](const ScaledLinearArguments& a) {
    scaled_linear_many_rows(a, nullptr);
  };
  const auto first = product.run(multiply);
  for (int i = 0; i < 20; ++i) EXPECT_EQ(product.run(multiply), first) << "launch " << i;
}

// ---- few rows

class ScaledFewRows : public testing::TestWithParam<std::tuple<int, int>> {};

TEST_P(ScaledFewRows, EveryPlanEqualsDoublePrecision) {
  const auto [warpgroups, splits] = GetParam();
  int turn = 0;
  for (const int rows : {1, 8, 9, 31, 32}) {
    int columns = 8;
    while (columns < rows) columns *= 2;
    for (const auto& [n, k] : {std::pair(8, 2048), std::pair(200, 2176), std::pair(1000, 4096)}) {
      ++turn;
      const Product product({.rows = rows,
                             .n = n,
                             .k = k,
                             .gap = turn % 3,
                             .row_scales = turn % 4 == 1,
                             .out_type = turn % 5 < 2 ? DType::kF32 : DType::kBF16});
      for (const int clusters : {1, 3, 9}) {
        if (clusters > n / 8) continue;
        SCOPED_TRACE(product.name() + ", clusters " + std::to_string(clusters));
        const FewRowsPlan plan = {.columns = columns,
                                  .warpgroups = warpgroups,
                                  .splits = splits,
                                  .clusters = clusters,
                                  .wide_ring = turn % 5 == 0};
        const Multiply multiply = [&](const ScaledLinearArguments& a) {
          scaled_linear_few_rows(plan, a, nullptr);
        };
        const auto out = product.run(multiply);
        product.compare(out);
        EXPECT_EQ(product.run(multiply), out);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Plans, ScaledFewRows,
                         testing::Combine(testing::Values(1, 2), testing::Values(1, 2, 4, 8)));

const Multiply kFewRows = [](const ScaledLinearArguments& a) {
  scaled_linear_few_rows(a, nullptr);
};

TEST(ScaledFewRowsOfModels, EqualDoublePrecision) {
  for (const auto& [n, k] : {std::pair(2112, 7168), std::pair(576, 7168), std::pair(24576, 1536),
                             std::pair(3072, 1536), std::pair(32768, 512), std::pair(7168, 2048),
                             std::pair(4096, 7168), std::pair(256, 128), std::pair(264, 384)}) {
    for (const int rows : {1, 20, 32}) {
      const Product product({rows, n, k, rows % 3, rows == 20});
      SCOPED_TRACE(product.name());
      product.compare(product.run(kFewRows));
    }
  }
}

TEST(ScaledFewRowsPadding, ChangesNoOtherRow) {
  Product product({24, 520, 2048});
  const auto before = product.run(kFewRows);
  product.spoil(5);
  const auto after = product.run(kFewRows);
  for (size_t i = 0; i < before.size(); ++i) {
    if (i / 520 == 5) continue;
    ASSERT_EQ(before[i], after[i]) << i;
  }
}

TEST(ScaledFewRowsRepeat, SameBitsFiftyTimes) {
  const Product product({27, 3648, 2048});
  const auto first = product.run(kFewRows);
  for (int i = 0; i < 50; ++i) EXPECT_EQ(product.run(kFewRows), first) << "launch " << i;
}

// ---- any number of rows

TEST(ScaledLinear, EqualsDoublePrecisionInAnyNumberOfRows) {
  for (const int rows : {1, 16, 64, 65, 128, 700}) {
    const Product product({.rows = rows, .n = 2112, .k = 1536, .row_scales = rows % 2 == 0});
    SCOPED_TRACE(product.name());
    product.compare(product.run([](const ScaledLinearArguments& a) { scaled_linear(a, nullptr); }));
  }
}

TEST(ScaledLinear, BatchInvariantRowsHaveTheSameBitsInAnyNumber) {
  constexpr int kMostRows = 700;
  const Multiply multiply = [](ScaledLinearArguments a) {
    a.batch_invariant = true;
    scaled_linear(a, nullptr);
  };
  for (const Case& c : {Case{kMostRows, 2112, 7168}, Case{kMostRows, 576, 7168, 1, false, true},
                        Case{kMostRows, 3072, 1536, 0, false, false, DType::kF32},
                        Case{kMostRows, 512, 128}, Case{kMostRows, 1024, 16384}}) {
    const Product product(c);
    SCOPED_TRACE(product.name());
    const auto expected = product.run(multiply);
    for (const int rows : {1, 2, 8, 9, 16, 31, 33, 64, 65, 100, 128, 200, 513}) {
      const auto actual = product.run(multiply, rows);
      EXPECT_TRUE(std::equal(actual.begin(), actual.end(), expected.begin())) << rows << " rows";
    }
  }
}

TEST(ScaledLinear, OfNoRowsDoesNothing) {
  scaled_linear({.x_row_stride = 128, .out_row_stride = 8, .n = 8, .k = 128}, nullptr);
  check(cudaDeviceSynchronize(), "synchronize");
}

}  // namespace
}  // namespace fathom::cuda
