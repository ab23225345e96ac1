// The absorption GEMMs in e4m3 on the GPU, against double precision and the host's quantisation.
#include "ops/scaled_linear/scaled_absorb_cuda.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <random>
#include <utility>
#include <vector>

#include "base/math.h"
#include "device/cuda/device_array.h"
#include "device/cuda/launch.h"
#include "device/cuda/random_data.h"
#include "ops/scaled_linear/scaled_absorb_plan.h"

namespace fathom::cuda {
namespace {

constexpr int kBlocks = 4;  // blocks of a head's weights

template <typename Vector>
auto& at(Vector& v, int64_t i) {
  return v[static_cast<size_t>(i)];
}

struct Case {
  int rows, heads;
  bool into_latent;
  int gap = 0;  // between heads and between rows, in units of 8 elements
};

class Absorption {
 public:
  explicit Absorption(const Case& c)
      : case_(c),
        n_(c.into_latent ? kAbsorbedLatent : kAbsorbedHead),
        k_(c.into_latent ? kAbsorbedHead : kAbsorbedLatent),
        x_head_stride_(k_ + 8 * c.gap),
        x_row_stride_(c.heads * x_head_stride_ + 8 * c.gap),
        out_head_stride_(n_ + 16 * c.gap),
        out_row_stride_(c.heads * out_head_stride_ + 8 * c.gap) {
    std::mt19937 random(static_cast<uint32_t>(c.rows * 31 + c.heads * 7 + c.gap));
    x_ = random_bf16(c.rows * x_row_stride_, 1.5f, random);
    for (int64_t i = 0; i < std::ssize(x_); ++i) {  // gaps between the heads' columns
      const int64_t within = i % x_row_stride_;
      if (within >= c.heads * x_head_stride_ || within % x_head_stride_ >= k_) at(x_, i) = 0x7FC0;
    }
    weight_.resize(static_cast<size_t>(c.heads * n_ * k_));
    std::normal_distribution<float> normal(0, 60);
    uint8_t some[256];
    for (uint8_t& value : some) value = to_e4m3(normal(random)).bits;
    for (uint8_t& value : weight_) value = some[random() & 255];
    std::uniform_real_distribution<float> exponent(-9, -4);
    weight_scales_.resize(static_cast<size_t>(c.heads * kBlocks));
    for (float& scale : weight_scales_) scale = std::exp2(exponent(random));
    x_there_ = DeviceArray<uint16_t>(x_);
    weight_there_ = DeviceArray<uint8_t>(weight_);
    weight_scales_there_ = DeviceArray<float>(weight_scales_);
    out_ = DeviceArray<uint16_t>(c.rows * out_row_stride_);
  }

  int64_t n() const { return n_; }
  int64_t out_row_stride() const { return out_row_stride_; }

  ScaledAbsorbArguments arguments() const {
    return {.x = x_there_.data(),
            .x_row_stride = x_row_stride_,
            .x_head_stride = x_head_stride_,
            .weight = weight_there_.data(),
            .weight_scales = weight_scales_there_.data(),
            .out = out_.data(),
            .out_row_stride = out_row_stride_,
            .out_head_stride = out_head_stride_,
            .rows = case_.rows,
            .heads = case_.heads,
            .n = static_cast<int32_t>(n_),
            .k = static_cast<int32_t>(k_)};
  }

  // The result's bits; the output is poisoned first.
  std::vector<uint16_t> run() const { return run(arguments()); }
  std::vector<uint16_t> run(const ScaledAbsorbArguments& arguments) const {
    check(cudaMemset(out_.data(), 0xFF, out_.bytes()), "poisoning");
    scaled_absorb(arguments, nullptr);
    check(cudaDeviceSynchronize(), "scaled_absorb");
    return out_.to_host();
  }

  // Sets row `row` of x to NaN.
  void spoil(int row) {
    for (int64_t i = 0; i < x_row_stride_; ++i) at(x_, row * x_row_stride_ + i) = 0x7FC0;
    x_there_.copy_from(x_);
  }

  void compare(const std::vector<uint16_t>& out) const {
    for (int64_t i = 0; i < std::ssize(out); ++i) {
      const int64_t within = i % out_row_stride_;
      const bool between =
          within >= case_.heads * out_head_stride_ || within % out_head_stride_ >= n_;
      ASSERT_EQ(std::isnan(from_bf16(at(out, i))), between) << "element " << i;
    }
    std::mt19937 random(1);
    const int64_t pairs = int64_t{case_.rows} * case_.heads;
    double error = 0, norm = 0, worst = 0;
    int64_t samples = 0;
    for (int64_t s = 0; s < std::min<int64_t>(pairs, 20); ++s) {
      const int64_t pair = pairs <= 20 ? s : static_cast<int64_t>(random()) % pairs;
      const int64_t row = pair / case_.heads, head = pair % case_.heads;
      const auto exact = product(row, head);
      for (int64_t column = 0; column < n_; ++column, ++samples) {
        const float got =
            from_bf16(at(out, row * out_row_stride_ + head * out_head_stride_ + column));
        const double expected = exact[static_cast<size_t>(column)], off = got - expected;
        error += off * off;
        norm += expected * expected;
        worst = std::max(worst, std::abs(off) - std::abs(expected) / 256);
      }
    }
    // bf16 rounds by 2^-8 at most, x in two terms of e4m3 likewise; the tensor cores drop bits
    // below 2^-13 of a sum's largest term.
    EXPECT_LE(std::sqrt(error / norm), 2.2e-3);
    EXPECT_LE(worst / std::sqrt(norm / static_cast<double>(samples)), 8e-3);
  }

  // Relative RMS error of `out` against the unquantized x, and that of the same GEMM in bf16, with
  // weights and results rounded to it.
  std::pair<double, double> errors(const std::vector<uint16_t>& out) const {
    double norm = 0, error = 0, wide_error = 0;
    for (int64_t row = 0; row < case_.rows; ++row) {
      for (int64_t head = 0; head < case_.heads; ++head) {
        const auto exact = product(row, head);
        for (int64_t column = 0; column < n_; ++column) {
          double wide = 0;
          for (int64_t i = 0; i < k_; ++i) {
            wide += double{from_bf16(bf16_bits(static_cast<float>(weight(head, column, i))))} *
                    from_bf16(at(x_, row * x_row_stride_ + head * x_head_stride_ + i));
          }
          const double expected = exact[static_cast<size_t>(column)];
          const double off =
              expected -
              from_bf16(at(out, row * out_row_stride_ + head * out_head_stride_ + column));
          const double wide_off = expected - from_bf16(bf16_bits(static_cast<float>(wide)));
          norm += expected * expected;
          error += off * off;
          wide_error += wide_off * wide_off;
        }
      }
    }
    return {std::sqrt(error / norm), std::sqrt(wide_error / norm)};
  }

 private:
  // A head's columns of a row in double precision.
  std::vector<double> product(int64_t row, int64_t head) const {
    std::vector<double> x, out;
    for (int64_t i = 0; i < k_; ++i) {
      x.push_back(from_bf16(at(x_, row * x_row_stride_ + head * x_head_stride_ + i)));
    }
    for (int64_t column = 0; column < n_; ++column) {
      double sum = 0;
      for (int64_t i = 0; i < k_; ++i) {
        sum += at(x, i) * weight(head, column, i);
      }
      out.push_back(sum);
    }
    return out;
  }

  double weight(int64_t head, int64_t column, int64_t i) const {
    const int64_t k_blocks = k_ / kScaleBlock;
    return double{to_float(e4m3{at(weight_, (head * n_ + column) * k_ + i)})} *
           at(weight_scales_, head * kBlocks + column / kScaleBlock * k_blocks + i / kScaleBlock);
  }

  Case case_;
  int64_t n_, k_, x_head_stride_, x_row_stride_, out_head_stride_, out_row_stride_;
  std::vector<uint16_t> x_;
  std::vector<uint8_t> weight_;
  std::vector<float> weight_scales_;
  DeviceArray<uint16_t> x_there_, out_;
  DeviceArray<uint8_t> weight_there_;
  DeviceArray<float> weight_scales_there_;
};

TEST(ScaledAbsorb, EqualsDoublePrecision) {
  int turn = 0;
  for (const int heads : {1, 16, 150}) {
    for (const int rows : {1, 2, 8, 9, 20, 64, 65, 140}) {
      for (const bool into_latent : {false, true}) {
        SCOPED_TRACE(testing::Message()
                     << rows << " rows, " << heads << " heads, into the latent " << into_latent);
        const Absorption absorption({rows, heads, into_latent, ++turn % 4});
        const auto out = absorption.run();
        absorption.compare(out);
        EXPECT_EQ(absorption.run(), out);
      }
    }
  }
}

TEST(ScaledAbsorb, OfThousandsOfRows) {
  for (const bool into_latent : {false, true}) {
    const Absorption absorption({3001, 16, into_latent});
    const auto out = absorption.run();
    absorption.compare(out);
    EXPECT_EQ(absorption.run(), out);
  }
}

TEST(ScaledAbsorb, ARowsBitsDependOnTheRowAlone) {
  for (const int heads : {16, 128}) {
    for (const bool into_latent : {false, true}) {
      const int most = heads == 16 ? 500 : 150;
      Absorption absorption({most, heads, into_latent});
      const auto all = absorption.run();
      absorption.spoil(7);
      for (const int rows : {most, 130, 64, 33, 17, 12, 8, 1}) {
        auto arguments = absorption.arguments();
        arguments.rows = rows;
        const auto some = absorption.run(arguments);
        for (int64_t i = 0; i < rows * absorption.out_row_stride(); ++i) {
          if (i / absorption.out_row_stride() == 7) continue;
          ASSERT_EQ(some[static_cast<size_t>(i)], all[static_cast<size_t>(i)])
              << i << " of " << rows << " rows";
        }
      }
    }
  }
}

// docs/numerics.md has the figures.
TEST(ScaledAbsorb, ErrorBesideThatOfBf16) {
  for (const bool into_latent : {true, false}) {
    const Absorption absorption({20, 4, into_latent});
    const auto [error, of_bf16] = absorption.errors(absorption.run());
    std::printf("%s, x in two terms of e4m3: %.4f; all in bf16 %.4f\n",
                into_latent ? "W_UK" : "W_UV", error, of_bf16);
    EXPECT_LE(error, of_bf16);
    EXPECT_LE(of_bf16, 0.003);
  }
}

// Input of the output projection: the bf16 result quantized, with the bf16 output or without.
TEST(ScaledAbsorb, ResultsInE4m3) {
  int turn = 0;
  for (const int heads : {16, 128}) {
    for (const int rows : {1, 9, 25, 30, 64, 97, 200}) {
      SCOPED_TRACE(testing::Message() << rows << " rows, " << heads << " heads");
      const Absorption absorption({rows, heads, false});
      const int64_t values_stride = heads * 128 + 16, scales_stride = round_up(rows + 1, 4);
      const DeviceArray<uint8_t> values(rows * values_stride);
      const DeviceArray<float> scales(heads * scales_stride);
      const auto in_bf16 = absorption.run();
      for (const bool alone : {false, true}) {
        check(cudaMemset(values.data(), 0xFF, values.bytes()), "poisoning");
        check(cudaMemset(scales.data(), 0xFF, scales.bytes()), "poisoning");
        auto arguments = absorption.arguments();
        arguments.quantized = {.values = values.data(),
                               .values_row_stride = values_stride,
                               .scales = scales.data(),
                               .scales_block_stride = scales_stride,
                               .form = ++turn % 2 == 0 ? ScaleForm::kPowerOfTwo : ScaleForm::kF32};
        if (alone) arguments.out = nullptr;
        const auto beside = absorption.run(arguments);
        if (!alone) {
          ASSERT_EQ(beside, in_bf16);
        }
        std::vector<uint8_t> expected(static_cast<size_t>(values.size()), 0xFF);
        std::vector<float> expected_scales(static_cast<size_t>(scales.size()));
        for (int64_t row = 0; row < rows; ++row) {
          for (int64_t head = 0; head < heads; ++head) {
            bf16 x[128];
            e4m3 y[128];
            for (int64_t i = 0; i < 128; ++i) {
              x[i] = {
                  in_bf16[static_cast<size_t>(row * absorption.out_row_stride() + head * 128 + i)]};
            }
            expected_scales[static_cast<size_t>(head * scales_stride + row)] =
                quantize_block(x, arguments.quantized.form, y);
            for (int64_t i = 0; i < 128; ++i) {
              expected[static_cast<size_t>(row * values_stride + head * 128 + i)] = y[i].bits;
            }
          }
        }
        ASSERT_EQ(values.to_host(), expected);
        const auto got_scales = scales.to_host();
        for (int64_t i = 0; i < std::ssize(got_scales); ++i) {
          const float got = got_scales[static_cast<size_t>(i)];
          if (i % scales_stride >= rows) {
            ASSERT_TRUE(std::isnan(got));
          } else {
            ASSERT_EQ(got, expected_scales[static_cast<size_t>(i)]) << "scale " << i;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace fathom::cuda
