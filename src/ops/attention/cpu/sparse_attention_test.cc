// Sparse attention against double precision over its list, and, over the list of all keys, against
// the dense absorbed form bit by bit.
#include "ops/attention/sparse_attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "ops/attention/cpu/attention_cpu.h"
#include "ops/attention/cpu/latent_problem_test_data.h"

namespace fathom {
namespace {

using Shape = LatentShape;

struct SparseOutput {
  std::vector<float> out;  // [rows, H, latent]
  std::vector<float> lse;  // [rows, H]
};

struct SparseProblem : LatentProblem {
  std::vector<SparseRow> all_rows;

  explicit SparseProblem(const Shape& s) : LatentProblem(s) {
    for (size_t i = 0; i < s.queries.size(); ++i) {
      for (int32_t query = 0; query < s.queries[i]; ++query) {
        all_rows.push_back(
            {query_start[i] + query, static_cast<int32_t>(i), s.contexts[i] + query + 1});
      }
    }
  }

  // Lists [rows, k] of keys drawn at random, with the row's own token among them now and then.
  std::vector<int32_t> random_lists(const std::vector<SparseRow>& listed, int64_t k) const {
    std::vector<int32_t> lists;
    for (const SparseRow& row : listed) {
      std::vector<int32_t> positions;
      for (int32_t p = shape.first_key; p < row.length; ++p) positions.push_back(p);
      for (size_t i = positions.size(); i > 1; --i) {
        std::swap(positions[i - 1],
                  positions[mix64(static_cast<uint64_t>(row.row) * 1000 + i) % i]);
      }
      positions.resize(std::min(positions.size(), static_cast<size_t>(k)));
      std::ranges::sort(positions);
      positions.resize(static_cast<size_t>(k), -1);
      lists.insert(lists.end(), positions.begin(), positions.end());
    }
    return lists;
  }

  SparseOutput run(CpuIsa isa, int threads, const std::vector<SparseRow>& listed,
                   const std::vector<int32_t>& lists, bool with_lse = true) const {
    return collect(threads, [&](ThreadPool& pool, TensorView out, TensorView lse,
                                std::span<std::byte> workspace) {
      const auto count = static_cast<int64_t>(listed.size());
      cpu::sparse_attention(
          pool, isa, q_latent.view({rows, shape.heads, shape.latent}),
          q_rope.view({rows, shape.heads, shape.rope}), batch(), listed,
          ConstTensorView(lists.data(), {count, std::ssize(lists) / std::max<int64_t>(count, 1)}),
          cache.layer(0), scale(), out, with_lse ? lse : TensorView(), workspace);
    });
  }

  SparseOutput run_dense(CpuIsa isa, int threads) const {
    const std::vector<int32_t> sequences = all_sequences();
    return collect(threads, [&](ThreadPool& pool, TensorView out, TensorView /*lse*/,
                                std::span<std::byte> workspace) {
      cpu::absorbed_attention(pool, isa, q_latent.view({rows, shape.heads, shape.latent}),
                              q_rope.view({rows, shape.heads, shape.rope}), batch(), sequences,
                              cache.layer(0), scale(), out, workspace);
    });
  }

  // Calls `attend` with poisoned outputs and a poisoned workspace.
  template <typename Attend>
  SparseOutput collect(int threads, const Attend& attend) const {
    ThreadPool pool(threads);
    const int64_t count = rows * shape.heads * shape.latent;
    SparseOutput result{
        std::vector<float>(static_cast<size_t>(count + 1), std::nanf("")),
        std::vector<float>(static_cast<size_t>(rows * shape.heads + 1), std::nanf(""))};
    std::vector<bf16> narrow(static_cast<size_t>(count + 1), bf16{0xFFFF});
    const TensorView out = shape.out_dtype == DType::kF32
                               ? TensorView(result.out.data(), {rows, shape.heads, shape.latent})
                               : TensorView(narrow.data(), {rows, shape.heads, shape.latent});
    std::vector<std::byte> workspace(
        static_cast<size_t>(cpu::sparse_attention_workspace_bytes(rows, shape.heads, shape.latent,
                                                                  threads, shape.rope) +
                            5),
        std::byte{0xFF});
    attend(pool, out, TensorView(result.lse.data(), {rows, shape.heads}),
           std::span(workspace).subspan(5));
    if (shape.out_dtype == DType::kBF16) {
      for (size_t i = 0; i < narrow.size(); ++i) result.out[i] = to_float(narrow[i]);
    }
    EXPECT_TRUE(std::isnan(result.out.back()) && std::isnan(result.lse.back()));
    result.out.pop_back();
    result.lse.pop_back();
    return result;
  }

  // The definition, in double precision: the output and, behind it, the log-sum-exp.
  std::vector<double> expected(const SparseRow& row, const int32_t* list, int64_t k,
                               int64_t head) const {
    const int64_t at = row.row * shape.heads + head;
    std::vector<std::vector<float>> keys;
    std::vector<double> weights;
    for (int64_t i = 0; i < k && list[i] >= 0; ++i) {
      std::vector<float> key(static_cast<size_t>(shape.latent + shape.rope));
      decode_row(cache.layout(), row_of(static_cast<size_t>(row.sequence), list[i]), key.data(),
                 key.data() + shape.latent);
      double score = 0;
      for (int64_t d = 0; d < shape.latent; ++d) {
        score += static_cast<double>(q_latent.wide[at * shape.latent + d]) * key[d];
      }
      for (int64_t d = 0; d < shape.rope; ++d) {
        score += static_cast<double>(q_rope.wide[at * shape.rope + d]) * key[shape.latent + d];
      }
      weights.push_back(score * scale());
      keys.push_back(std::move(key));
    }
    const double max = *std::ranges::max_element(weights);
    double sum = 0;
    for (double& weight : weights) sum += weight = std::exp(weight - max);
    std::vector<double> out(static_cast<size_t>(shape.latent + 1), 0);
    for (size_t i = 0; i < keys.size(); ++i) {
      for (int64_t d = 0; d < shape.latent; ++d) out[d] += weights[i] / sum * keys[i][d];
    }
    out.back() = max + std::log(sum);
    return out;
  }
};

const std::vector<Shape>& sparse_shapes() {
  constexpr auto kBF16 = DType::kBF16;
  constexpr auto kF32 = DType::kF32;
  static const std::vector<Shape> all = {
      {4, 512, 64, CacheFormat::kBF16, kBF16, kBF16, {1}, {300}},
      {4, 512, 64, CacheFormat::kBF16, kBF16, kF32, {1, 1, 3, 1}, {0, 63, 129, 1100}},
      {4, 512, 64, CacheFormat::kF32, kF32, kF32, {1, 2, 1}, {640, 65, 0}},
      {4, 512, 64, CacheFormat::kFp8Scaled, kBF16, kF32, {1, 2}, {500, 7}},
      {4, 512, 64, CacheFormat::kE4M3, kBF16, kF32, {1}, {77}},
      {4, 512, 64, CacheFormat::kE5M2, kBF16, kF32, {1}, {77}},
      // DeepSeek-V3.2's 128 heads: two groups of rows a query; and a prompt's rows.
      {128, 512, 64, CacheFormat::kFp8Scaled, kBF16, kF32, {1}, {150}},
      {16, 512, 64, CacheFormat::kBF16, kBF16, kF32, {9}, {200}},
      // Odd sizes, with a ragged scale block; hidden keys.
      {3, 200, 6, CacheFormat::kFp8Scaled, kBF16, kF32, {2}, {70}},
      {5, 33, 2, CacheFormat::kBF16, kBF16, kF32, {3}, {90}, 1},
      {3, 96, 16, CacheFormat::kF32, kF32, kF32, {1, 5}, {1130, 62}, 1},
      {2, 64, 16, CacheFormat::kBF16, kF32, kF32, {2}, {90}, 30},
  };
  return all;
}

class SparseAttention : public testing::TestWithParam<CpuIsa> {};

TEST_P(SparseAttention, MatchesDoublePrecisionOverTheList) {
  for (const Shape& shape : sparse_shapes()) {
    const SparseProblem problem(shape);
    for (const int64_t k : {int64_t{1}, int64_t{7}, int64_t{64}, int64_t{150}}) {
      SCOPED_TRACE(testing::Message() << shape.heads << " heads, latent " << shape.latent
                                      << ", cache " << name_of(shape.format) << ", k " << k);
      const std::vector<int32_t> lists = problem.random_lists(problem.all_rows, k);
      const SparseOutput result = problem.run(GetParam(), 2, problem.all_rows, lists);
      const bool exact = shape.format == CacheFormat::kF32;
      // bf16: rounded probabilities, and rounded products with the scales in FP8.
      const double tolerance = exact ? 4e-6 : 8e-3;
      const int64_t head_step = shape.heads > 16 ? 29 : 1;
      for (size_t i = 0; i < problem.all_rows.size(); ++i) {
        for (int64_t h = 0; h < shape.heads; h += head_step) {
          const SparseRow& row = problem.all_rows[i];
          const auto expected = problem.expected(row, lists.data() + i * k, k, h);
          const int64_t at = row.row * shape.heads + h;
          for (int64_t d = 0; d < shape.latent; ++d) {
            ASSERT_NEAR(result.out[at * shape.latent + d], expected[d], tolerance)
                << "row " << i << " head " << h << " element " << d;
          }
          ASSERT_NEAR(result.lse[at], expected.back(), exact ? 4e-6 : 8e-3);
        }
      }
    }
  }
}

// The list of all keys: not a bit differs from dense absorbed attention, in any format, with hidden
// keys, and where the keys are split.
TEST_P(SparseAttention, TheIdentityListHasTheBitsOfDenseAttention) {
  std::vector<Shape> all = sparse_shapes();
  for (const int32_t context : {30, 31, 511, 1021, 2046, 3000}) {
    all.push_back({2, 64, 16, CacheFormat::kBF16, DType::kBF16, DType::kF32, {4}, {context}});
    all.push_back({2, 64, 16, CacheFormat::kF32, DType::kF32, DType::kF32, {4}, {context}, 1});
  }
  for (const Shape& shape : all) {
    const SparseProblem problem(shape);
    const int64_t k = int64_t{problem.max_pages} * 64;  // more than any row sees
    const SparseOutput dense = problem.run_dense(GetParam(), 2);
    const SparseOutput sparse =
        problem.run(GetParam(), 2, problem.all_rows, problem.random_lists(problem.all_rows, k));
    ASSERT_EQ(std::memcmp(dense.out.data(), sparse.out.data(), dense.out.size() * sizeof(float)), 0)
        << shape.heads << " heads, cache " << name_of(shape.format) << ", context "
        << shape.contexts[0];
  }
}

// A row's bits depend on its own list only, and rows that are not listed are left alone.
TEST_P(SparseAttention, OtherRowsAndThreadsChangeNoBit) {
  for (const Shape& shape : sparse_shapes()) {
    const SparseProblem problem(shape);
    constexpr int64_t kK = 100;
    const std::vector<int32_t> lists = problem.random_lists(problem.all_rows, kK);
    const SparseOutput whole = problem.run(GetParam(), 2, problem.all_rows, lists);
    const SparseOutput again = problem.run(GetParam(), 4, problem.all_rows, lists, false);
    ASSERT_EQ(std::memcmp(whole.out.data(), again.out.data(), whole.out.size() * sizeof(float)), 0);
    EXPECT_TRUE(std::isnan(again.lse[0]));  // not wanted
    const int64_t stride = shape.heads * shape.latent;
    for (size_t i = 0; i < problem.all_rows.size(); ++i) {
      const auto first = lists.begin() + static_cast<int64_t>(i) * kK;
      const std::vector<int32_t> list(first, first + kK);
      const SparseOutput alone = problem.run(GetParam(), 1, {problem.all_rows[i]}, list);
      for (int64_t at = 0; at < problem.rows * stride; ++at) {
        if (at / stride == problem.all_rows[i].row) {
          ASSERT_EQ(alone.out[at], whole.out[at]) << "row " << i;
        } else {
          ASSERT_TRUE(std::isnan(alone.out[at])) << "row " << at / stride << " was written";
        }
      }
    }
  }
}

// Keys that no list names may hold anything: NaN in all of them changes nothing.
TEST_P(SparseAttention, KeysThatAreNotChosenAreNotRead) {
  for (const auto format : {CacheFormat::kBF16, CacheFormat::kF32, CacheFormat::kFp8Scaled}) {
    const DType dtype = format == CacheFormat::kF32 ? DType::kF32 : DType::kBF16;
    const SparseProblem problem({4, 128, 16, format, dtype, DType::kF32, {1}, {700}});
    const std::vector<int32_t> list = problem.random_lists(problem.all_rows, 75);
    const SparseOutput before = problem.run(GetParam(), 2, problem.all_rows, list);
    for (int32_t token = 0; token < 701; ++token) {
      if (std::ranges::binary_search(list, token)) continue;
      std::memset(problem.row_of(0, token), 0xFF,
                  static_cast<size_t>(problem.cache.layout().row_bytes()));
    }
    const SparseOutput after = problem.run(GetParam(), 2, problem.all_rows, list);
    EXPECT_EQ(before.out, after.out);
  }
}

// Two lists that share the keys give, merged by log-sum-exp, what one list gives.
TEST_P(SparseAttention, PartsMergeToTheWhole) {
  const SparseProblem problem({3, 64, 16, CacheFormat::kF32, DType::kF32, DType::kF32, {1}, {400}});
  const std::vector<int32_t> list = problem.random_lists(problem.all_rows, 90);
  const SparseOutput whole = problem.run(GetParam(), 1, problem.all_rows, list);
  SparseOutput first =
      problem.run(GetParam(), 1, problem.all_rows, {list.begin(), list.begin() + 33});
  const SparseOutput rest =
      problem.run(GetParam(), 1, problem.all_rows, {list.begin() + 33, list.end()});
  ThreadPool pool(1);
  merge_attention(Stream(pool), ConstTensorView(rest.out.data(), {1, 3, 64}),
                  ConstTensorView(rest.lse.data(), {1, 3}),
                  TensorView(first.out.data(), {1, 3, 64}), TensorView(first.lse.data(), {1, 3}));
  for (size_t i = 0; i < whole.out.size(); ++i) ASSERT_NEAR(first.out[i], whole.out[i], 2e-6);
  for (size_t i = 0; i < whole.lse.size(); ++i) ASSERT_NEAR(first.lse[i], whole.lse[i], 4e-6);
}

INSTANTIATE_TEST_SUITE_P(Levels, SparseAttention, testing::ValuesIn(runnable_levels()),
                         [](const auto& level) { return std::string(name_of(level.param)); });

}  // namespace
}  // namespace fathom
