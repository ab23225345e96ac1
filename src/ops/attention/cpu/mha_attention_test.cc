#include <gtest/gtest.h>

#include <cstring>

#include "ops/attention/attention_test_data.h"
#include "ops/attention/cpu/attention_cpu.h"

namespace fathom {
namespace {

struct MhaShape {
  int64_t queries, keys, heads, nope, rope, v;
  int64_t visible_before;
  DType dtype;
};

struct Output {
  std::vector<float> out;
  std::vector<float> lse;
};

struct Inputs {
  explicit Inputs(const MhaShape& s)
      : q_nope(s.queries * s.heads * s.nope, s.dtype, 1, 2),
        q_rope(s.queries * s.heads * s.rope, s.dtype, 2, 2),
        kv(s.keys * s.heads * (s.nope + s.v), s.dtype, 3, 2),
        k_rope(s.keys * s.rope, s.dtype, 4, 2) {}
  TestTensor q_nope, q_rope, kv, k_rope;
};

float scale_of(const MhaShape& s) { return 1 / std::sqrt(static_cast<float>(s.nope + s.rope)); }

Output run(const MhaShape& s, const Inputs& in, CpuIsa isa, int threads) {
  ThreadPool pool(threads);
  Output result{std::vector<float>(s.queries * s.heads * s.v + 1, std::nanf("")),
                std::vector<float>(s.queries * s.heads + 1, std::nanf(""))};
  // 0xFF bytes are NaN in either type: a read of unwritten memory shows.
  std::vector<std::byte> workspace(
      cpu::mha_attention_workspace_bytes(s.heads, s.nope + s.rope, s.v, threads) + 7,
      std::byte{0xFF});
  cpu::mha_attention(pool, isa, in.q_nope.view({s.queries, s.heads, s.nope}),
                     in.q_rope.view({s.queries, s.heads, s.rope}),
                     in.kv.view({s.keys, s.heads, s.nope + s.v}), in.k_rope.view({s.keys, s.rope}),
                     s.visible_before, scale_of(s),
                     TensorView(result.out.data(), {s.queries, s.heads, s.v}),
                     TensorView(result.lse.data(), {s.queries, s.heads}),
                     std::span(workspace).subspan(7));  // a workspace need not be aligned
  EXPECT_TRUE(std::isnan(result.out.back()));
  EXPECT_TRUE(std::isnan(result.lse.back()));
  return result;
}

// The definition, in double precision: one query of one head. Returns the log-sum-exp.
double attend(const MhaShape& s, const Inputs& in, int64_t i, int64_t h, std::vector<double>& out) {
  const int64_t seen = std::clamp<int64_t>(s.visible_before + i + 1, 0, s.keys);
  std::vector<double> weights;
  double max = -std::numeric_limits<double>::infinity();
  for (int64_t j = 0; j < seen; ++j) {
    double score = 0;
    for (int64_t d = 0; d < s.nope; ++d) {
      score += static_cast<double>(in.q_nope.wide[(i * s.heads + h) * s.nope + d]) *
               in.kv.wide[(j * s.heads + h) * (s.nope + s.v) + d];
    }
    for (int64_t d = 0; d < s.rope; ++d) {
      score += static_cast<double>(in.q_rope.wide[(i * s.heads + h) * s.rope + d]) *
               in.k_rope.wide[j * s.rope + d];
    }
    weights.push_back(score * scale_of(s));
    max = std::max(max, weights.back());
  }
  double sum = 0;
  for (double& weight : weights) sum += weight = std::exp(weight - max);
  out.assign(static_cast<size_t>(s.v), 0);
  for (int64_t j = 0; j < seen; ++j) {
    for (int64_t d = 0; d < s.v; ++d) {
      out[d] += weights[j] / sum * in.kv.wide[(j * s.heads + h) * (s.nope + s.v) + s.nope + d];
    }
  }
  return max + std::log(sum);
}

const std::vector<MhaShape>& mha_shapes() {
  static const std::vector<MhaShape> all = {
      {512, 512, 4, 128, 64, 128, 0, DType::kBF16},     // the bundled model, a causal block
      {130, 1000, 2, 128, 64, 128, 999, DType::kBF16},  // a prefix: every key is visible
      {70, 333, 3, 32, 16, 24, 263, DType::kBF16},      // odd sizes, a block after a prefix
      {1, 1, 1, 128, 64, 128, 0, DType::kBF16},
      {65, 65, 2, 33, 6, 7, 0, DType::kBF16},      // an odd nope: half a bf16 pair
      {40, 30, 2, 32, 16, 24, -20, DType::kBF16},  // the first 20 queries see nothing
      {300, 300, 2, 128, 64, 128, 0, DType::kF32},
      {70, 333, 3, 32, 16, 24, 263, DType::kF32},
      {65, 65, 2, 33, 6, 7, 0, DType::kF32},
      {40, 30, 2, 32, 16, 24, -20, DType::kF32},
      {9, 700, 5, 128, 64, 128, 691, DType::kF32},
  };
  return all;
}

class MhaAttention : public testing::TestWithParam<CpuIsa> {};

TEST_P(MhaAttention, MatchesDoublePrecision) {
  double worst_of[2] = {};  // largest errors in f32 and bf16, recorded
  for (const MhaShape& s : mha_shapes()) {
    SCOPED_TRACE(testing::Message() << s.queries << " x " << s.keys << ", " << s.heads << " heads, "
                                    << name_of(s.dtype));
    const Inputs in(s);
    const Output actual = run(s, in, GetParam(), 2);
    // bf16: probabilities are rounded to 8 bits; values are below 2.
    const double tolerance = s.dtype == DType::kBF16 ? 8e-3 : 4e-6;
    std::vector<double> expected;
    double& worst = worst_of[s.dtype == DType::kBF16];
    for (int64_t i = 0; i < s.queries; ++i) {
      for (int64_t h = 0; h < s.heads; ++h) {
        const double lse = attend(s, in, i, h, expected);
        const float actual_lse = actual.lse[i * s.heads + h];
        const float* row = actual.out.data() + (i * s.heads + h) * s.v;
        if (s.visible_before + i < 0) {
          ASSERT_EQ(actual_lse, -std::numeric_limits<float>::infinity());
          for (int64_t d = 0; d < s.v; ++d) ASSERT_EQ(row[d], 0);
          continue;
        }
        ASSERT_NEAR(actual_lse, lse, 2e-5) << "query " << i << " head " << h;
        for (int64_t d = 0; d < s.v; ++d) {
          ASSERT_NEAR(row[d], expected[d], tolerance) << "query " << i << " head " << h;
          worst = std::max(worst, std::abs(row[d] - expected[d]));
        }
      }
    }
  }
  RecordProperty("worst_bf16", fmt::format("{:.2e}", worst_of[true]));
  RecordProperty("worst_f32", fmt::format("{:.2e}", worst_of[false]));
}

TEST_P(MhaAttention, ThreadsChangeNoBit) {
  for (const MhaShape& s : mha_shapes()) {
    const Inputs in(s);
    const Output two = run(s, in, GetParam(), 2);
    const Output five = run(s, in, GetParam(), 5);
    const size_t out_bytes = (two.out.size() - 1) * sizeof(float);
    EXPECT_EQ(std::memcmp(two.out.data(), five.out.data(), out_bytes), 0);
    EXPECT_EQ(std::memcmp(two.lse.data(), five.lse.data(), (two.lse.size() - 1) * 4), 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Levels, MhaAttention, testing::ValuesIn(runnable_levels()),
                         [](const auto& level) { return std::string(name_of(level.param)); });

}  // namespace
}  // namespace fathom
