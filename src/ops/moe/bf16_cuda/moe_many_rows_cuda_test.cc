// The mixture of experts for many tokens on the GPU against double precision.
#include "ops/moe/bf16_cuda/moe_many_rows_cuda.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "device/cuda/random_data.h"
#include "ops/moe/bf16_cuda/moe_problem_cuda.h"

namespace fathom::cuda {
namespace {

constexpr uint16_t kNan = 0x7FC0;

class Reference {
 public:
  explicit Reference(const MoeProblem& problem)
      : shape_(problem.shape),
        ids_(problem.expert_ids),
        x_(problem.x.to_host()),
        weights_(problem.weights.to_host()),
        gate_up_(problem.gate_up.to_host()),
        down_(problem.down.to_host()),
        shared_gate_up_(problem.shared_gate_up.to_host()),
        shared_down_(problem.shared_down.to_host()) {}

  std::vector<double> row(int32_t row) const {
    std::vector<double> out(static_cast<size_t>(shape_.hidden));
    const int64_t inter = shape_.inter, hidden = shape_.hidden;
    for (int j = 0; j < shape_.experts_per_token; ++j) {
      const auto pair = static_cast<size_t>(row) * shape_.experts_per_token + j;
      if (ids_[pair] < 0) continue;
      add_mlp(row, gate_up_.data() + ids_[pair] * 2 * inter * hidden,
              down_.data() + ids_[pair] * hidden * inter, inter, weights_[pair], out);
    }
    if (shape_.shared_inter > 0) {
      add_mlp(row, shared_gate_up_.data(), shared_down_.data(), shape_.shared_inter, 1, out);
    }
    return out;
  }

 private:
  static double dot(const uint16_t* a, const double* b, int64_t size) {
    double sum = 0;
    for (int64_t i = 0; i < size; ++i) sum += double{from_bf16(a[i])} * b[i];
    return sum;
  }

  void add_mlp(int32_t row, const uint16_t* gate_up, const uint16_t* down, int64_t inter,
               double weight, std::vector<double>& out) const {
    const int64_t hidden = shape_.hidden;
    std::vector<double> x(static_cast<size_t>(hidden)), activations(static_cast<size_t>(inter));
    for (int64_t i = 0; i < hidden; ++i) {
      x[static_cast<size_t>(i)] = from_bf16(x_[static_cast<size_t>(row * hidden + i)]);
    }
    for (int64_t i = 0; i < inter; ++i) {
      const double gate = dot(gate_up + i * hidden, x.data(), hidden);
      const double up = dot(gate_up + (inter + i) * hidden, x.data(), hidden);
      activations[static_cast<size_t>(i)] = gate / (1 + std::exp(-gate)) * up;
    }
    for (int64_t i = 0; i < hidden; ++i) {
      out[static_cast<size_t>(i)] += weight * dot(down + i * inter, activations.data(), inter);
    }
  }

  MoeShape shape_;
  std::vector<int32_t> ids_;
  std::vector<uint16_t> x_;
  std::vector<float> weights_;
  std::vector<uint16_t> gate_up_, down_, shared_gate_up_, shared_down_;
};

std::vector<float> run(const MoeProblem& problem, DType out_type) {
  check(cudaMemset(problem.out.data(), 0xFF, problem.out.bytes()), "poison");
  check(cudaMemset(problem.workspace.data(), 0xFF, problem.workspace.bytes()), "poison");
  moe_many_rows(problem.arguments(out_type), nullptr);
  check(cudaDeviceSynchronize(), "synchronize");
  auto values = problem.out.to_host();
  if (out_type == DType::kF32) return values;
  const auto* bits = reinterpret_cast<const uint16_t*>(values.data());
  return widen(std::vector<uint16_t>(bits, bits + values.size()));
}

void compare(const MoeProblem& problem, DType out_type = DType::kF32, int samples = 24) {
  const auto out = run(problem, out_type);
  const auto hidden = static_cast<size_t>(problem.shape.hidden);
  for (const float value : out) ASSERT_FALSE(std::isnan(value));
  const Reference reference(problem);
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
    // Activations and each expert's result are rounded to bf16.
    EXPECT_LE(std::sqrt(row_error), 8e-3 * std::sqrt(row_norm)) << "row " << row;
    error += row_error;
    norm += row_norm;
  }
  EXPECT_LE(std::sqrt(error / norm), 4e-3);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(run(problem, out_type), out);
}

constexpr MoeShape kTiny = {
    .hidden = 256, .num_experts = 16, .experts_per_token = 4, .inter = 128, .shared_inter = 128};
// V2-Lite's layer with fewer than its 64 experts: as many as the host fills in a second.
constexpr MoeShape kV2Lite = {
    .hidden = 2048, .num_experts = 8, .experts_per_token = 6, .inter = 1408, .shared_inter = 2816};
constexpr MoeShape kV3 = {
    .hidden = 7168, .num_experts = 4, .experts_per_token = 2, .inter = 2048, .shared_inter = 2048};
constexpr MoeShape kOdd = {
    .hidden = 192, .num_experts = 256, .experts_per_token = 8, .inter = 64, .shared_inter = 0};

TEST(MoeManyRows, EqualsDoublePrecision) {
  for (const int32_t rows : {1, 63, 65, 300, 1000}) {
    SCOPED_TRACE(rows);
    compare({kTiny, rows, random_experts(kTiny, rows, 3), 1});
    compare({kOdd, rows, random_experts(kOdd, rows, 4), 2});
  }
}

TEST(MoeManyRows, RealShapes) {
  compare({kV2Lite, 300, random_experts(kV2Lite, 300, 3), 1}, DType::kF32, 6);
  compare({kV2Lite, 1100, random_experts(kV2Lite, 1100, 3), 1}, DType::kBF16, 6);
  compare({kV3, 400, random_experts(kV3, 400, 3), 1}, DType::kBF16, 4);
}

TEST(MoeManyRows, MoreExpertsThan256) {
  for (const int32_t experts : {384, 512}) {
    const MoeShape shape = {.hidden = 192,
                            .num_experts = experts,
                            .experts_per_token = 8,
                            .inter = 64,
                            .shared_inter = 64};
    for (const int32_t rows : {1, 300, 16384}) {
      SCOPED_TRACE(testing::Message() << rows << " rows of " << experts << " experts");
      compare({shape, rows, random_experts(shape, rows, 5), 1});
    }
  }
}

TEST(MoeManyRows, ManyTokens) {
  compare({kTiny, 30000, random_experts(kTiny, 30000, 7), 1});
  compare({kOdd, 16384, random_experts(kOdd, 16384, 7), 1});
}

TEST(MoeManyRows, AllTokensAtTheSameExperts) {
  std::vector<int32_t> ids;
  for (int row = 0; row < 900; ++row) ids.insert(ids.end(), {15, 2, 7, 0});
  compare({kTiny, 900, ids, 1});
}

TEST(MoeManyRows, SomeTokensHaveFewerExpertsOrNone) {
  std::mt19937 random(1);
  auto ids = random_experts(kTiny, 500, 3);
  for (int32_t& id : ids) id = random() % 3 == 0 ? -1 : id;
  std::fill_n(ids.begin() + 400 * 4, 50 * 4, -1);
  compare({kTiny, 500, ids, 1});
  std::ranges::fill(ids, -1);
  compare({kTiny, 500, ids, 1});
}

TEST(MoeManyRows, RowsOfNanChangeNoOther) {
  constexpr int32_t kRows = 333;
  auto ids = random_experts(kTiny, kRows, 3);
  for (int32_t row = 0; row < kRows; row += 5) std::fill_n(ids.begin() + row * 4, 4, -1);
  const MoeProblem problem(kTiny, kRows, ids, 1);
  const auto clean = run(problem, DType::kF32);
  auto x = problem.x.to_host();
  for (int32_t row = 0; row < kRows; row += 5) {
    std::fill_n(x.begin() + row * kTiny.hidden, kTiny.hidden, kNan);
  }
  check(cudaMemcpy(problem.x.data(), x.data(), problem.x.bytes(), cudaMemcpyHostToDevice), "copy");
  const auto out = run(problem, DType::kF32);
  for (size_t i = 0; i < out.size(); ++i) {
    if (i / kTiny.hidden % 5 != 0) {
      ASSERT_EQ(out[i], clean[i]) << "element " << i;
    }
  }
}

// A row's result depends neither on the other rows nor on the order of its expert list.
TEST(MoeManyRows, SameBitsInAnyBatch) {
  auto ids = random_experts(kTiny, 700, 3);
  const auto all = run({kTiny, 700, ids, 1}, DType::kF32);
  for (int32_t row = 0; row < 700; ++row)
    std::reverse(ids.begin() + row * 4, ids.begin() + row * 4 + 4);
  ids.resize(100 * 4);
  MoeProblem part(kTiny, 100, ids, 1);
  auto weights = part.weights.to_host();
  for (int32_t row = 0; row < 100; ++row) {
    std::reverse(weights.begin() + row * 4, weights.begin() + row * 4 + 4);
  }
  part.weights.copy_from(weights);
  const auto some = run(part, DType::kF32);
  for (size_t i = 0; i < some.size(); ++i) ASSERT_EQ(some[i], all[i]) << "element " << i;
}

}  // namespace
}  // namespace fathom::cuda
