// Shared by the tests of few-token MoE on a GPU, bf16 and e4m3: tokens and their experts,
// comparisons with a reference on the host and with other launches.
//
// A number format under test is a class with
//   using Rows = …;  tokens' activations
//   static constexpr bool kScaled;
//   static Rows random_rows(int64_t rows, int64_t hidden, std::mt19937& random);
//   static void set_nan(Rows& x, int64_t row, int64_t hidden);
//   static void set_random(Rows& x, int64_t row, int64_t hidden, std::mt19937& random);
//   struct Weights { MoeShape shape; … };
//   static Weights random_weights(const MoeShape& shape, std::mt19937& random);
//   class OnHost, made of Weights, with
//     std::vector<double> row(const FewRowsTokens<Rows>&, int64_t row, ScaleForm form) const;
//   class OnGpu, made of Weights, with
//     template <typename T>
//     std::vector<T> run(const FewRowsTokens<Rows>&, const FewRowsWay&) const;
//   static double most_error(const FewRowsWay& way, int32_t rows);  relative, of all rows together
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "device/cuda/co_resident.h"
#include "device/cuda/random_data.h"
#include "ops/linear/few_rows_cuda.h"
#include "ops/moe/bf16_cuda/moe_cuda.h"
#include "ops/moe/plans/moe_few_rows_plan.h"
#include "tensor/scale_form.h"

namespace fathom::cuda {

// Selects the launch: the few-row one, with this plan if given, or the one-row one.
struct FewRowsWay {
  const MoeFewRowsPlan* plan = nullptr;
  bool one_row = false;
  ScaleForm form = ScaleForm::kF32;  // scales of e4m3 activations
};

template <typename Rows>
struct FewRowsTokens {
  int32_t rows = 0;
  Rows x;
  std::vector<int32_t> ids;
  std::vector<float> factors;
};

// Padding rows hold NaN and have no experts.
inline bool is_padding(int64_t row) { return row % 7 == 6; }

template <typename Kind>
class MoeFewRowsTrial {
 public:
  using Tokens = FewRowsTokens<typename Kind::Rows>;
  using Weights = typename Kind::Weights;
  using OnGpu = typename Kind::OnGpu;

  explicit MoeFewRowsTrial(const MoeShape& shape, uint32_t seed)
      : random_(seed), weights_(Kind::random_weights(shape, random_)), gpu_(weights_) {}

  const OnGpu& gpu() const { return gpu_; }
  const MoeShape& shape() const { return weights_.shape; }

  // Each token's experts at random among the first `choice`.
  Tokens random_tokens(int32_t rows, int32_t choice, std::mt19937& random) const {
    const MoeShape& s = shape();
    Tokens tokens;
    tokens.rows = rows;
    tokens.x = Kind::random_rows(rows, s.hidden, random);
    std::vector<int32_t> experts(static_cast<size_t>(choice));
    std::iota(experts.begin(), experts.end(), 0);
    for (int32_t row = 0; row < rows; ++row) {
      std::shuffle(experts.begin(), experts.end(), random);
      for (int32_t i = 0; i < s.experts_per_token; ++i) {
        tokens.ids.push_back(is_padding(row) ? -1 : experts[static_cast<size_t>(i)]);
        tokens.factors.push_back(static_cast<float>(random() % 1000) / 1000);
      }
      if (is_padding(row)) Kind::set_nan(tokens.x, row, s.hidden);
    }
    return tokens;
  }
  Tokens random_tokens(int32_t rows) { return random_tokens(rows, shape().num_experts, random_); }

  // Compares every `step`-th row with the host; runs fp32 results twice, and bf16.
  void compare(int32_t rows, int32_t choice, int64_t step, const FewRowsWay& way = {}) {
    SCOPED_TRACE(testing::Message() << rows << " rows, among " << choice << " experts"
                                    << (way.one_row ? ", one row's" : ""));
    if (host_ == nullptr) host_ = std::make_unique<typename Kind::OnHost>(weights_);
    std::mt19937 random(static_cast<uint32_t>(rows * 1000 + choice));
    const Tokens tokens = random_tokens(rows, choice, random);
    const auto f32 = gpu_.template run<float>(tokens, way);
    expect_near_host(tokens, f32, step, way);
    const auto again = gpu_.template run<float>(tokens, way);
    EXPECT_EQ(std::memcmp(f32.data(), again.data(), f32.size() * 4), 0);
    const auto narrow = gpu_.template run<uint16_t>(tokens, way);
    for (size_t i = 0; i < f32.size(); ++i) {
      if (std::isnan(f32[i])) continue;  // a padding row
      ASSERT_EQ(narrow[i], bf16_bits(f32[i])) << i;
    }
  }

  // Compares about rows_checked of all rows, with random experts and with all tokens on as few
  // experts as possible.
  void compare_all(const std::vector<int32_t>& all_rows, int64_t rows_checked) {
    for (const int32_t rows : all_rows) {
      const int64_t step = std::max<int64_t>(1, rows / rows_checked) | 1;
      compare(rows, shape().num_experts, step);
      if (rows == 1) compare(1, shape().num_experts, 1, {.one_row = true});
      if (Kind::kScaled && rows == 1) {
        compare(1, shape().num_experts, 1, {.one_row = true, .form = ScaleForm::kPowerOfTwo});
      }
      compare(rows, shape().experts_per_token, step,
              {.form = Kind::kScaled ? ScaleForm::kPowerOfTwo : ScaleForm::kF32});
    }
  }

  void compare_every_plan(const std::vector<int32_t>& all_rows) {
    const MoeShape& s = shape();
    const MoeFewRowsPlan chosen = plan_moe_few_rows(
        {1, s.hidden, s.num_experts, s.experts_per_token, s.inter, s.shared_inter, Kind::kScaled},
        DeviceContext::current().budget().clusters);
    for (const int warpgroups : {1, 2}) {
      for (const int splits : {1, 2}) {
        for (const int clusters : {4, 9, 64}) {
          if (s.hidden / 8 / clusters > 8 * warpgroups) continue;
          for (const int32_t rows : all_rows) {
            const MoeFewRowsPlan plan = {
                .blocks = chosen.blocks,
                .warpgroups = warpgroups,
                .splits = splits,
                .clusters = clusters,
                .ring_bytes = (clusters == 9 ? 3 : 2) * moe_stage_bytes(rows, warpgroups)};
            compare(rows, s.num_experts, rows / 3, {.plan = &plan});
          }
        }
      }
    }
  }

  void expect_the_same_bits_again() {
    const Tokens tokens = random_tokens(37);
    const auto first = gpu_.template run<uint16_t>(tokens, {});
    for (int i = 0; i < 50; ++i) EXPECT_EQ(gpu_.template run<uint16_t>(tokens, {}), first);
  }

  // Repeats the one-row launch, interleaved with padding and other launches that use the same
  // counters.
  void expect_one_row_to_give_the_same_bits_again() {
    const Tokens tokens = random_tokens(1);
    Tokens padding = tokens;
    std::fill(padding.ids.begin(), padding.ids.end(), -1);
    Kind::set_nan(padding.x, 0, shape().hidden);
    const FewRowsWay way{.one_row = true};
    const auto first = gpu_.template run<uint16_t>(tokens, way);
    for (int i = 0; i < 50; ++i) {
      if (i % 7 == 3) gpu_.template run<uint16_t>(padding, way);
      if (i % 5 == 2) gpu_.template run<uint16_t>(tokens, {});
      EXPECT_EQ(gpu_.template run<uint16_t>(tokens, way), first);
    }
  }

  void expect_padding_to_change_no_other_row() {
    Tokens tokens = random_tokens(48);
    const int64_t hidden = shape().hidden;
    const auto before = gpu_.template run<float>(tokens, {});
    for (int64_t row = 0; row < tokens.rows; ++row) {
      if (is_padding(row)) Kind::set_random(tokens.x, row, hidden, random_);
    }
    const auto after = gpu_.template run<float>(tokens, {});
    for (int64_t i = 0; i < std::ssize(before); ++i) {
      if (is_padding(i / hidden)) continue;
      ASSERT_EQ(before[static_cast<size_t>(i)], after[static_cast<size_t>(i)]) << i;
    }
  }

 private:
  void expect_near_host(const Tokens& tokens, const std::vector<float>& out, int64_t step,
                        const FewRowsWay& way) const {
    const int64_t hidden = shape().hidden;
    double error = 0, norm = 0;
    for (int64_t row = 0; row < tokens.rows; row += step) {
      if (is_padding(row)) continue;
      const auto expected = host_->row(tokens, row, way.form);
      for (int64_t i = 0; i < hidden; ++i) {
        const double actual = out[static_cast<size_t>(row * hidden + i)];
        ASSERT_TRUE(std::isfinite(actual)) << "row " << row << ", column " << i;
        const double difference = actual - expected[static_cast<size_t>(i)];
        error += difference * difference;
        norm += expected[static_cast<size_t>(i)] * expected[static_cast<size_t>(i)];
      }
    }
    EXPECT_LE(std::sqrt(error / norm), Kind::most_error(way, tokens.rows));
  }

  std::mt19937 random_;
  const Weights weights_;
  const OnGpu gpu_;
  std::unique_ptr<typename Kind::OnHost> host_;
};

}  // namespace fathom::cuda
