#include "ops/moe/moe.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>

#include "ops/linear/linear_test_data.h"

namespace fathom {
namespace {

using testing::Rows;
using testing::Scales;
using testing::Source;

// An expert as a checkpoint stores it: gate and up are separate matrices.
struct Expert {
  Expert(uint64_t seed, int64_t hidden, int64_t intermediate, WeightFormat stored)
      : format(stored),
        gate(seed, intermediate, hidden, dtype(), scales()),
        up(seed + 1, intermediate, hidden, dtype(), scales()),
        down(seed + 2, hidden, intermediate, dtype(), scales()) {
    weights.gate_up = *PackedMatrix::allocate(2 * intermediate, hidden, format, "test");
    weights.gate_up.pack(intermediate, up.matrix);
    weights.gate_up.pack(0, gate.matrix);
    weights.down = pack(down, format);
  }
  DType dtype() const {
    return format == WeightFormat::kF8E4M3 ? DType::kF8E4M3
           : format == WeightFormat::kBF16 ? DType::kBF16
                                           : DType::kF32;
  }
  Scales scales() const { return format == WeightFormat::kF8E4M3 ? Scales::kBlock : Scales::kNone; }

  // The output for one row of x, in double, and a bound on the effect of rounding the activations
  // to x's type and of fp32 sums.
  template <typename T>
  void add(ConstTensorView x, int64_t m, double factor, std::vector<double>& out,
           std::vector<double>& bound) const {
    std::vector<double> activation, error;
    for (int64_t i = 0; i < gate.rows; ++i) {
      const auto g = testing::product<T>(x, m, gate, format, i);
      const auto u = testing::product<T>(x, m, up, format, i);
      activation.push_back(g.value / (1 + std::exp(-g.value)) * u.value);
      const double rounding = std::is_same_v<T, bf16> ? 0x1.02p-9 : 0x1p-24;
      error.push_back(
          std::abs(activation.back()) * (rounding + 1e-6) +
          4e-6 * (1.1 * g.magnitude * std::abs(u.value) + (1 + std::abs(g.value)) * u.magnitude));
    }
    for (int64_t n = 0; n < down.rows; ++n) {
      for (int64_t i = 0; i < down.cols; ++i) {
        const double weight = down.weight(format, n, i) * factor;
        const auto at = static_cast<size_t>(i);
        out[static_cast<size_t>(n)] += activation[at] * weight;
        bound[static_cast<size_t>(n)] +=
            std::abs(weight) * (error[at] + 4e-6 * std::abs(activation[at]));
      }
    }
  }

  WeightFormat format;
  Source gate, up, down;
  MlpWeights weights;
};

struct Model {
  int64_t hidden, intermediate, shared_intermediate;
  int num_experts, per_token;
};

// Distinct experts for every token, unevenly spread: all tokens have expert 1.
struct Routing {
  Routing(const Model& model, int64_t rows) : per_token(model.per_token) {
    for (int64_t t = 0; t < rows; ++t) {
      for (int s = 0; s < per_token; ++s) {
        ids.push_back(s == 0 ? 1 : (1 + s + static_cast<int32_t>(t) % 2 * 2) % model.num_experts);
        weights.push_back(0.5f + 0.4f * testing::random_value(77, 0, t * per_token + s));
      }
      // Not in ascending order, because the gate orders by score.
      std::reverse(ids.end() - per_token, ids.end());
    }
  }
  ConstTensorView ids_view() const {
    return ConstTensorView(ids.data(), {static_cast<int64_t>(ids.size()) / per_token, per_token});
  }
  ConstTensorView weights_view() const {
    return ConstTensorView(weights.data(),
                           {static_cast<int64_t>(ids.size()) / per_token, per_token});
  }
  int per_token;
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

class MoeTest : public ::testing::TestWithParam<WeightFormat> {
 protected:
  void build(const Model& model) {
    model_ = model;
    experts_.clear();
    weights_.clear();
    for (int e = 0; e < model.num_experts; ++e) {
      experts_.push_back(std::make_unique<Expert>(100 + static_cast<uint64_t>(e) * 10, model.hidden,
                                                  model.intermediate, GetParam()));
      weights_.push_back(std::move(experts_.back()->weights));
    }
    shared_ = std::make_unique<Expert>(5, model.hidden, model.shared_intermediate, GetParam());
  }

  // out starts from what Rows(9) holds; the workspace is exactly as large as requested.
  template <typename T>
  Rows<float> run(int threads, const Rows<T>& x, const Routing& routing, int64_t first,
                  int64_t rows) {
    ThreadPool pool(threads);
    Rows<float> out(9, x.view.size(0), model_.hidden);
    const int64_t bytes =
        moe_workspace_bytes(rows, model_.hidden, model_.num_experts, model_.per_token,
                            model_.intermediate, model_.shared_intermediate);
    const Buffer workspace = *Buffer::allocate(bytes, "test");
    std::memset(workspace.data(), 0xFF, static_cast<size_t>(bytes));
    moe(Stream(pool), x.view.rows(first, rows), routing.ids_view().rows(first, rows),
        routing.weights_view().rows(first, rows), weights_, &shared_->weights,
        out.view.rows(first, rows), {workspace.data(), static_cast<size_t>(bytes)});
    return out;
  }

  template <typename T>
  void check(int64_t rows) {
    const Rows<T> x(8, rows, model_.hidden);
    const Rows<float> before(9, rows, model_.hidden);
    const Routing routing(model_, rows);
    const Rows<float> out = run(2, x, routing, 0, rows);
    for (int64_t t = 0; t<rows; t += rows> 20 ? 37 : 1) {
      std::vector<double> expected, bound(static_cast<size_t>(model_.hidden), 1e-6);
      for (int64_t i = 0; i < model_.hidden; ++i) expected.push_back(before.view.row<float>(t)[i]);
      for (int s = 0; s < model_.per_token; ++s) {
        const auto at = static_cast<size_t>(t * model_.per_token + s);
        experts_[static_cast<size_t>(routing.ids[at])]->template add<T>(
            x.view, t, routing.weights[at], expected, bound);
      }
      shared_->template add<T>(x.view, t, 1.0, expected, bound);
      for (int64_t i = 0; i < model_.hidden; ++i) {
        const auto at = static_cast<size_t>(i);
        ASSERT_NEAR(out.view.row<float>(t)[i], expected[at], bound[at])
            << "row " << t << " of " << rows << ", column " << i;
      }
    }
    // Alone, and with any number of threads: bitwise identical.
    const size_t row_bytes = static_cast<size_t>(model_.hidden) * sizeof(float);
    for (const int threads : {1, 2, 3, 5}) {
      const Rows<float> again = run(threads, x, routing, 0, rows);
      for (int64_t t = 0; t < rows; ++t) {
        ASSERT_EQ(std::memcmp(again.view.row<float>(t), out.view.row<float>(t), row_bytes), 0);
      }
      const int64_t t = rows / 2;
      const Rows<float> alone = run(threads, x, routing, t, 1);
      ASSERT_EQ(std::memcmp(alone.view.row<float>(t), out.view.row<float>(t), row_bytes), 0);
    }
  }

  Model model_;
  std::vector<std::unique_ptr<Expert>> experts_;
  std::vector<MlpWeights> weights_;
  std::unique_ptr<Expert> shared_;
};

TEST_P(MoeTest, MatchesDoubleAndDoesNotDependOnBatchOrThreads) {
  // The bundled model's shape with fewer experts, and sizes without common divisors.
  for (const Model& model : {Model{256, 128, 128, 6, 4}, Model{72, 56, 120, 5, 3}}) {
    build(model);
    for (const int64_t rows : {1, 2, 7, 40, 230}) {
      check<bf16>(rows);
      check<float>(rows);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(MoeTest, NoRowsAndNoSharedExpert) {
  build({72, 56, 56, 3, 2});
  ThreadPool pool(2);
  const Routing routing(model_, 2);
  const Rows<float> x(8, 2, 72);
  const Rows<float> with_shared = run(2, x, routing, 0, 2);
  Rows<float> out(9, 2, 72);
  const int64_t bytes = moe_workspace_bytes(2, 72, 3, 2, 56, 0);
  const Buffer workspace = *Buffer::allocate(bytes, "test");
  const std::span<std::byte> memory(workspace.data(), static_cast<size_t>(bytes));
  moe(Stream(pool), x.view.rows(0, 0), routing.ids_view().rows(0, 0),
      routing.weights_view().rows(0, 0), weights_, nullptr, out.view.rows(0, 0), memory);
  moe(Stream(pool), x.view, routing.ids_view(), routing.weights_view(), weights_, nullptr, out.view,
      memory);
  // The shared expert is the last term: adding it by mlp is bitwise identical.
  const int64_t mlp_bytes = mlp_workspace_bytes(2, 72, 56);
  const Buffer mlp_workspace = *Buffer::allocate(mlp_bytes, "test");
  mlp(Stream(pool), x.view, shared_->weights, out.view,
      {mlp_workspace.data(), static_cast<size_t>(mlp_bytes)});
  for (int64_t t = 0; t < 2; ++t) {
    EXPECT_EQ(std::memcmp(out.view.row<float>(t), with_shared.view.row<float>(t), 72 * 4), 0);
  }
}

TEST_P(MoeTest, OutputsOfSingleExpertsAndTheirSumAreBitwiseTheWhole) {
  for (const Model& model : {Model{256, 128, 128, 6, 4}, Model{72, 56, 120, 5, 3}}) {
    build(model);
    for (const int64_t rows : {1, 7, 130}) {
      const Rows<bf16> x(8, rows, model.hidden);
      const Routing routing(model, rows);
      const Rows<float> whole = run(2, x, routing, 0, rows);

      // Pairs from the last row to the first, so that they are not in the order of the batch.
      const int64_t k = model.per_token, pairs = rows * k;
      std::vector<int32_t> x_rows, pair_experts;
      for (int64_t i = pairs - 1; i >= 0; --i) {
        x_rows.push_back(static_cast<int32_t>(i / k));
        pair_experts.push_back(routing.ids[static_cast<size_t>(i)]);
      }
      std::vector<float> outputs(static_cast<size_t>(pairs * model.hidden), NAN);
      const TensorView outputs_view(outputs.data(), {pairs, model.hidden});
      const int64_t bytes =
          std::max(expert_outputs_workspace_bytes(pairs, model.num_experts, model.intermediate),
                   mlp_workspace_bytes(rows, model.hidden, model.shared_intermediate));
      const Buffer workspace = *Buffer::allocate(bytes, "test");
      std::memset(workspace.data(), 0xFF, static_cast<size_t>(bytes));
      const std::span<std::byte> memory(workspace.data(), static_cast<size_t>(bytes));
      ThreadPool pool(3);
      expert_outputs(Stream(pool), x.view, x_rows, pair_experts, weights_, outputs_view, memory);

      std::vector<WeightedRow> terms;
      for (int64_t t = 0; t < rows; ++t) {
        std::vector<int64_t> of_row(static_cast<size_t>(k));
        std::iota(of_row.begin(), of_row.end(), t * k);
        std::sort(of_row.begin(), of_row.end(), [&](int64_t a, int64_t b) {
          return routing.ids[static_cast<size_t>(a)] < routing.ids[static_cast<size_t>(b)];
        });
        for (const int64_t i : of_row) {
          terms.push_back(
              {outputs_view.row<float>(pairs - 1 - i), routing.weights[static_cast<size_t>(i)]});
        }
      }
      Rows<float> out(9, rows, model.hidden);
      add_expert_outputs(Stream(pool), terms, k, out.view);
      mlp(Stream(pool), x.view, shared_->weights, out.view, memory);
      for (int64_t t = 0; t < rows; ++t) {
        ASSERT_EQ(std::memcmp(out.view.row<float>(t), whole.view.row<float>(t),
                              static_cast<size_t>(model.hidden) * sizeof(float)),
                  0)
            << "row " << t << " of " << rows;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, MoeTest,
                         ::testing::Values(WeightFormat::kBF16, WeightFormat::kF8E4M3,
                                           WeightFormat::kF32));

}  // namespace
}  // namespace fathom
