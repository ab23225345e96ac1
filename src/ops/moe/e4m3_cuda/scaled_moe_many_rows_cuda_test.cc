// The mixture of experts in e4m3 for many tokens on the GPU against double precision.
#include "ops/moe/e4m3_cuda/scaled_moe_many_rows_cuda.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "device/cuda/random_data.h"
#include "ops/moe/bf16_cuda/moe_problem_cuda.h"
#include "ops/moe/e4m3_cuda/scaled_moe_problem_cuda.h"

namespace fathom::cuda {
namespace {

constexpr uint8_t kNanE4M3 = 0x7F;

std::vector<float> run(const ScaledMoeProblem& problem, DType out_type,
                       ScaleForm form = ScaleForm::kF32) {
  check(cudaMemset(problem.out.data(), 0xFF, problem.out.bytes()), "poison");
  check(cudaMemset(problem.workspace.data(), 0xFF, problem.workspace.bytes()), "poison");
  ScaledMoeArguments arguments = problem.arguments(out_type);
  arguments.form = form;
  scaled_moe_many_rows(arguments, nullptr);
  check(cudaDeviceSynchronize(), "synchronize");
  auto values = problem.out.to_host();
  if (out_type == DType::kF32) return values;
  const auto* bits = reinterpret_cast<const uint16_t*>(values.data());
  return widen(std::vector<uint16_t>(bits, bits + values.size()));
}

void compare(const ScaledMoeProblem& problem, DType out_type = DType::kF32, int samples = 12,
             ScaleForm form = ScaleForm::kF32) {
  const auto out = run(problem, out_type, form);
  const auto hidden = static_cast<size_t>(problem.shape.hidden);
  for (const float value : out) ASSERT_FALSE(std::isnan(value));
  const ScaledMoeReference reference(problem, form);
  std::mt19937 random(1);
  double error = 0, norm = 0;
  for (int s = 0; s < samples; ++s) {
    const auto row = static_cast<int32_t>(random() % static_cast<uint32_t>(problem.rows));
    const auto expected = reference.row(row);
    double row_error = 0, row_norm = 0;
    for (size_t i = 0; i < hidden; ++i) {
      const double off = out[static_cast<size_t>(row) * hidden + i] - expected[i];
      row_error += off * off;
      row_norm += expected[i] * expected[i];
    }
    // wgmma's sums are accurate to about 2^-13 of their largest term; some activations round to the
    // neighbouring e4m3, a sixteenth away, and one of few can be most of a row.
    EXPECT_LE(std::sqrt(row_error), 5e-2 * std::sqrt(row_norm)) << "row " << row;
    error += row_error;
    norm += row_norm;
  }
  EXPECT_LE(std::sqrt(error / norm), 1.5e-2);  // without quantized activations: 4e-2
  for (int i = 0; i < 3; ++i) EXPECT_EQ(run(problem, out_type, form), out);
}

constexpr MoeShape kTiny = {
    .hidden = 256, .num_experts = 16, .experts_per_token = 4, .inter = 128, .shared_inter = 128};
// hidden is no multiple of the 256 rows of down's tiles.
constexpr MoeShape kOdd = {
    .hidden = 384, .num_experts = 256, .experts_per_token = 8, .inter = 128, .shared_inter = 0};
// Layers with fewer experts: as many as the host fills in a second. An odd number of blocks of k,
// and of columns of down.
constexpr MoeShape kOddBlocks = {
    .hidden = 2176, .num_experts = 16, .experts_per_token = 4, .inter = 128, .shared_inter = 128};
constexpr MoeShape kV2Lite = {
    .hidden = 2048, .num_experts = 8, .experts_per_token = 6, .inter = 1408, .shared_inter = 2816};
constexpr MoeShape kV3 = {
    .hidden = 7168, .num_experts = 4, .experts_per_token = 2, .inter = 2048, .shared_inter = 2048};
constexpr MoeShape kV3Tp8 = {
    .hidden = 7168, .num_experts = 8, .experts_per_token = 4, .inter = 256, .shared_inter = 256};
constexpr MoeShape kDense = {
    .hidden = 7168, .num_experts = 1, .experts_per_token = 1, .inter = 18432, .shared_inter = 0};

TEST(ScaledMoeManyRows, EqualsDoublePrecision) {
  for (const int32_t rows : {1, 2, 63, 65, 300, 1000}) {
    SCOPED_TRACE(rows);
    compare({kTiny, rows, random_experts(kTiny, rows, 3), 1});
    compare({kOdd, rows, random_experts(kOdd, rows, 4), 2});
  }
}

// Covers every number of token units in a tile.
TEST(ScaledMoeManyRows, AnyTokensAnExpert) {
  for (const int32_t rows : {9, 17, 33, 52, 64, 79, 96, 111, 128, 130, 145, 260, 350, 385, 590}) {
    SCOPED_TRACE(rows);
    std::vector<int32_t> ids;
    for (int row = 0; row < rows; ++row) ids.insert(ids.end(), {15, 2, 7, 0});
    compare({kTiny, rows, ids, 1}, DType::kBF16, 24);
    compare({kOddBlocks, rows, ids, 1}, DType::kBF16, 4);
  }
}

TEST(ScaledMoeManyRows, RealShapes) {
  compare({kV2Lite, 300, random_experts(kV2Lite, 300, 3), 1}, DType::kF32, 4);
  compare({kV3, 400, random_experts(kV3, 400, 3), 1}, DType::kBF16, 3);
  compare({kV3Tp8, 200, random_experts(kV3Tp8, 200, 3), 1}, DType::kBF16, 4);
  compare({kDense, 150, std::vector<int32_t>(150), 1}, DType::kBF16, 1);
}

TEST(ScaledMoeManyRows, MoreExpertsThan256) {
  for (const int32_t experts : {384, 512}) {
    const MoeShape shape = {.hidden = 256,
                            .num_experts = experts,
                            .experts_per_token = 8,
                            .inter = 128,
                            .shared_inter = 128};
    for (const int32_t rows : {1, 300, 16384}) {
      SCOPED_TRACE(testing::Message() << rows << " rows of " << experts << " experts");
      compare({shape, rows, random_experts(shape, rows, 5), 1});
    }
  }
}

TEST(ScaledMoeManyRows, ScalesThatArePowersOfTwo) {
  compare({kTiny, 500, random_experts(kTiny, 500, 3), 1}, DType::kF32, 24, ScaleForm::kPowerOfTwo);
}

TEST(ScaledMoeManyRows, ManyTokens) {
  compare({kTiny, 30000, random_experts(kTiny, 30000, 7), 1});
  compare({kOdd, 16384, random_experts(kOdd, 16384, 7), 1});
  compare({kOddBlocks, 5000, random_experts(kOddBlocks, 5000, 7), 1}, DType::kBF16, 4);
}

TEST(ScaledMoeManyRows, SomeTokensHaveFewerExpertsOrNone) {
  std::mt19937 random(1);
  auto ids = random_experts(kTiny, 500, 3);
  for (int32_t& id : ids) id = random() % 3 == 0 ? -1 : id;
  std::fill_n(ids.begin() + 400 * 4, 50 * 4, -1);
  compare({kTiny, 500, ids, 1});
  std::ranges::fill(ids, -1);
  compare({kTiny, 500, ids, 1});
}

TEST(ScaledMoeManyRows, RowsOfNanChangeNoOther) {
  constexpr int32_t kRows = 333;
  auto ids = random_experts(kTiny, kRows, 3);
  const ScaledMoeProblem problem(kTiny, kRows, ids, 1);
  const auto clean = run(problem, DType::kF32);
  auto x = problem.x.to_host();
  for (int32_t row = 0; row < kRows; row += 5) {
    std::fill_n(x.begin() + row * kTiny.hidden, kTiny.hidden, kNanE4M3);
  }
  check(cudaMemcpy(problem.x.data(), x.data(), problem.x.bytes(), cudaMemcpyHostToDevice), "copy");
  const auto out = run(problem, DType::kF32);
  for (size_t i = 0; i < out.size(); ++i) {
    if (i / kTiny.hidden % 5 != 0) {
      ASSERT_EQ(out[i], clean[i]) << "element " << i;
    } else {
      ASSERT_TRUE(std::isnan(out[i])) << "element " << i;
    }
  }
}

void compare_batches(const MoeShape& shape) {
  auto ids = random_experts(shape, 700, 3);
  const ScaledMoeProblem whole(shape, 700, ids, 1);
  const auto all = run(whole, DType::kF32);
  for (int32_t row = 0; row < 700; ++row)
    std::reverse(ids.begin() + row * 4, ids.begin() + row * 4 + 4);
  auto weights = whole.weights.to_host();
  const auto x = whole.x.to_host();
  const auto scales = whole.x_scales.to_host();
  for (const int32_t rows : {1, 5, 100}) {
    SCOPED_TRACE(rows);
    const std::vector<int32_t> some_ids(ids.begin(), ids.begin() + rows * 4);
    ScaledMoeProblem part(shape, rows, some_ids, 1);
    std::vector<float> some_weights(weights.begin(), weights.begin() + rows * 4);
    for (int32_t row = 0; row < rows; ++row) {
      std::reverse(some_weights.begin() + row * 4, some_weights.begin() + row * 4 + 4);
    }
    part.weights.copy_from(some_weights);
    part.x.copy_from(std::vector<uint8_t>(x.begin(), x.begin() + rows * shape.hidden));
    auto some_scales = part.x_scales.to_host();
    for (int64_t i = 0; i < std::ssize(some_scales); ++i) {
      const int64_t row = i % part.x_scales_stride, block = i / part.x_scales_stride;
      if (row < rows) {
        some_scales[static_cast<size_t>(i)] =
            scales[static_cast<size_t>(block * whole.x_scales_stride + row)];
      }
    }
    part.x_scales.copy_from(some_scales);
    const auto some = run(part, DType::kF32);
    for (size_t i = 0; i < some.size(); ++i) ASSERT_EQ(some[i], all[i]) << "element " << i;
  }
}

// A row's result depends neither on the other rows nor on the order of its expert list.
TEST(ScaledMoeManyRows, SameBitsInAnyBatch) {
  compare_batches(kTiny);
  compare_batches(kOddBlocks);
}

}  // namespace
}  // namespace fathom::cuda
