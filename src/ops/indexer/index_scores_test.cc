// Index scores against the definition in double precision, at every instruction level.
#include "ops/indexer/index_scores.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cache/index_key_row.h"
#include "ops/attention/attention_test_data.h"
#include "ops/indexer/indexer_cpu.h"

namespace fathom {
namespace {

struct ScoreShape {
  int64_t heads, dim;
  IndexKeyFormat format;
  std::vector<int32_t> queries;
  std::vector<int32_t> contexts;
};

// Paged index keys of random values for the batch, pages in scattered order and with a gap between
// them; bytes that no sequence owns are 0xFF, NaN in every format.
struct Problem {
  ScoreShape shape;
  IndexKeyLayout layout;
  int32_t first_key = 0;
  std::vector<int32_t> query_start = {0};
  std::vector<int32_t> block_tables;
  int32_t max_pages = 0;
  std::vector<std::byte> memory;
  IndexKeyPages pages;
  std::vector<float> q;  // [rows, H, dim], the values that the operation is given
  std::vector<std::byte> q_stored;
  TestTensor weights;
  std::vector<SparseRow> rows;

  static int64_t total_rows(const ScoreShape& s) {
    int64_t rows = 0;
    for (const int32_t queries : s.queries) rows += queries;
    return rows;
  }

  explicit Problem(const ScoreShape& s)
      : shape(s), layout{s.format, s.dim}, weights(total_rows(s) * s.heads, DType::kF32, 21, 1) {
    int32_t num_pages = 1;  // page 0 stays unused
    for (size_t i = 0; i < s.queries.size(); ++i) {
      query_start.push_back(query_start.back() + s.queries[i]);
      max_pages = std::max(max_pages, (s.queries[i] + s.contexts[i] + 63) / 64);
      num_pages += (s.queries[i] + s.contexts[i] + 63) / 64;
    }
    const int64_t stride = layout.page_bytes() + 24;
    memory.assign(static_cast<size_t>(num_pages * stride), std::byte{0xFF});
    pages = {layout, memory.data() + 4, num_pages, stride};
    int32_t next = num_pages - 1;
    for (size_t i = 0; i < s.queries.size(); ++i) {
      const int32_t tokens = s.queries[i] + s.contexts[i];
      for (int32_t page = 0; page < max_pages; ++page) {
        block_tables.push_back(page * 64 < tokens ? next-- : -1);
      }
      for (int32_t token = 0; token < tokens; ++token) {
        const TestTensor key(s.dim, DType::kF32, 100 + i * 1'000'000 + token, 1 + token % 5);
        encode_index_key(layout, key.wide.data(), row_of(i, token));
      }
      for (int32_t query = 0; query < s.queries[i]; ++query) {
        rows.push_back(
            {query_start[i] + query, static_cast<int32_t>(i), s.contexts[i] + query + 1});
      }
    }
    make_queries();
  }

  std::byte* row_of(size_t sequence, int32_t token) const {
    return pages.row(block_tables[sequence * max_pages + token / 64], token % 64);
  }

  // Random values, rounded to the type that goes with the format: e4m3 codes without scales.
  void make_queries() {
    const int64_t count = total_rows(shape) * shape.heads * shape.dim;
    const TestTensor wide(count, DType::kF32, 22, 3);
    const DType dtype = index_query_type(shape.format);
    q_stored.resize(static_cast<size_t>(count * size_of(dtype)));
    for (int64_t i = 0; i < count; ++i) {
      const float value = wide.wide[i];
      if (dtype == DType::kF8E4M3) {
        const e4m3 code = to_e4m3(value);
        reinterpret_cast<e4m3*>(q_stored.data())[i] = code;
        q.push_back(to_float(code));
      } else if (dtype == DType::kBF16) {
        const bf16 bits = to_bf16(value);
        reinterpret_cast<bf16*>(q_stored.data())[i] = bits;
        q.push_back(to_float(bits));
      } else {
        reinterpret_cast<float*>(q_stored.data())[i] = value;
        q.push_back(value);
      }
    }
  }

  PagedBatch batch() const {
    return {query_start, shape.contexts, block_tables, max_pages, {}, first_key};
  }

  int64_t columns() const {
    int64_t columns = 0;
    for (const SparseRow& row : rows) columns = std::max<int64_t>(columns, row.length);
    return columns + 3;
  }

  // [listed rows, columns()], what is not written NaN of a known pattern.
  std::vector<float> run(CpuIsa isa, int threads, const std::vector<SparseRow>& listed) const {
    ThreadPool pool(threads);
    const auto count = static_cast<int64_t>(listed.size());
    std::vector<float> scores(static_cast<size_t>(count * columns() + 1), poison());
    std::vector<std::byte> workspace(
        static_cast<size_t>(
            cpu::index_scores_workspace_bytes(count, shape.heads, shape.dim, threads) + 5),
        std::byte{0xFF});
    cpu::index_scores(pool, isa,
                      ConstTensorView(q_stored.data(), index_query_type(shape.format),
                                      {total_rows(shape), shape.heads, shape.dim}),
                      weights.view({total_rows(shape), shape.heads}), batch(), listed, pages,
                      TensorView(scores.data(), {count, columns()}),
                      std::span(workspace).subspan(5));
    EXPECT_TRUE(is_poison(scores.back()));
    scores.pop_back();
    return scores;
  }

  static float poison() { return std::bit_cast<float>(0xFFABCDEFu); }
  static bool is_poison(float value) { return std::bit_cast<uint32_t>(value) == 0xFFABCDEFu; }

  // The definition, and the sum of the magnitudes that its terms have.
  std::pair<double, double> expected(const SparseRow& row, int32_t position) const {
    std::vector<float> key(static_cast<size_t>(shape.dim));
    decode_index_key(layout, row_of(static_cast<size_t>(row.sequence), position), key.data());
    double score = 0, size = 0;
    for (int64_t head = 0; head < shape.heads; ++head) {
      const int64_t at = row.row * shape.heads + head;
      double dot = 0, terms = 0;
      for (int64_t i = 0; i < shape.dim; ++i) {
        const double term = static_cast<double>(q[at * shape.dim + i]) * key[i];
        dot += term;
        terms += std::abs(term);
      }
      score += weights.wide[at] * std::max(dot, 0.0);
      size += std::abs(weights.wide[at]) * terms;
    }
    return {score, size};
  }
};

std::vector<ScoreShape> score_shapes() {
  constexpr auto kE4M3 = IndexKeyFormat::kE4M3;
  constexpr auto kBF16 = IndexKeyFormat::kBF16;
  constexpr auto kF32 = IndexKeyFormat::kF32;
  return {
      {64, 128, kE4M3, {1, 3, 1}, {300, 62, 0}},  // DeepSeek-V3.2
      {32, 128, kE4M3, {2}, {130}},               // GLM-5
      {64, 128, kBF16, {2}, {70}},
      {64, 128, kF32, {2}, {70}},
      // A prompt's chunk: more rows than a block and a wave hold, several chunks of keys.
      {16, 32, kE4M3, {70, 1}, {900, 1700}},
      {16, 32, kF32, {70, 1}, {900, 1700}},
      // Numbers of heads with other registers and several blocks, odd widths.
      {1, 32, kE4M3, {2}, {50}},
      {3, 128, kF32, {2}, {50}},
      {17, 6, kE4M3, {2}, {97}},
      {48, 66, kE4M3, {2}, {97}},
      {48, 130, kBF16, {2}, {97}},
      {129, 32, kE4M3, {2}, {97}},
      {100, 34, kF32, {2}, {97}},
  };
}

class IndexScores : public testing::TestWithParam<CpuIsa> {};

TEST_P(IndexScores, MatchDoublePrecision) {
  for (const ScoreShape& shape : score_shapes()) {
    SCOPED_TRACE(testing::Message()
                 << shape.heads << " heads of " << shape.dim << ", " << name_of(shape.format));
    const Problem problem(shape);
    const std::vector<float> scores = problem.run(GetParam(), 2, problem.rows);
    const int64_t columns = problem.columns();
    for (size_t i = 0; i < problem.rows.size(); ++i) {
      const SparseRow& row = problem.rows[i];
      for (int32_t s = 0; s < columns; ++s) {
        const float actual = scores[i * columns + s];
        if (s >= row.length) {
          ASSERT_TRUE(Problem::is_poison(actual)) << "row " << i << " sees key " << s;
          continue;
        }
        const auto [score, size] = problem.expected(row, s);
        ASSERT_NEAR(actual, score, size * 2e-6 + 1e-30) << "row " << i << " key " << s;
      }
    }
  }
}

TEST_P(IndexScores, OtherRowsAndThreadsChangeNoBit) {
  for (const ScoreShape& shape : score_shapes()) {
    const Problem problem(shape);
    const int64_t columns = problem.columns();
    const std::vector<float> whole = problem.run(GetParam(), 2, problem.rows);
    const std::vector<float> again = problem.run(GetParam(), 4, problem.rows);
    ASSERT_EQ(std::memcmp(whole.data(), again.data(), whole.size() * sizeof(float)), 0);
    for (size_t i = 0; i<problem.rows.size(); i += problem.rows.size()> 10 ? 9 : 1) {
      const std::vector<float> alone = problem.run(GetParam(), 1, {problem.rows[i]});
      ASSERT_EQ(std::memcmp(alone.data(), whole.data() + i * columns,
                            static_cast<size_t>(problem.rows[i].length) * sizeof(float)),
                0)
          << "row " << i;
    }
  }
}

TEST_P(IndexScores, KeysBeforeTheFirstAreNotRead) {
  for (const int32_t first : {1, 2, 70}) {
    Problem problem({3, 32, IndexKeyFormat::kE4M3, {2, 1}, {70, 900}});
    problem.first_key = first;
    for (int32_t token = 0; token < first; ++token) {
      for (const size_t s : {0, 1}) std::memset(problem.row_of(s, token), 0xFF, 36);
    }
    const std::vector<float> scores = problem.run(GetParam(), 2, problem.rows);
    for (size_t i = 0; i < problem.rows.size(); ++i) {
      for (int32_t s = 0; s < problem.rows[i].length; ++s) {
        const float actual = scores[i * problem.columns() + s];
        if (s < first) {
          ASSERT_TRUE(Problem::is_poison(actual));
        } else {
          const auto [score, size] = problem.expected(problem.rows[i], s);
          ASSERT_NEAR(actual, score, size * 2e-6);
        }
      }
    }
  }
}

// A plateau: with every product cut off the score is 0 exactly, whatever the weights.
TEST_P(IndexScores, AKeyThatNoHeadWantsScoresZero) {
  Problem problem({4, 32, IndexKeyFormat::kF32, {1}, {40}});
  auto* q = reinterpret_cast<float*>(problem.q_stored.data());
  for (int64_t i = 0; i < int64_t{4} * 32; ++i) q[i] = -std::abs(q[i]);
  const std::vector<float> ones(32, 1.0f);
  encode_index_key(problem.layout, ones.data(), problem.row_of(0, 7));
  const std::vector<float> scores = problem.run(GetParam(), 1, problem.rows);
  EXPECT_EQ(scores[7], 0.0f);
}

TEST_P(IndexScores, ADamagedKeyOrQueryGivesNan) {
  for (const auto format : {IndexKeyFormat::kE4M3, IndexKeyFormat::kBF16, IndexKeyFormat::kF32}) {
    Problem problem({5, 32, format, {2}, {60}});
    std::memset(problem.row_of(0, 9), 0xFF, static_cast<size_t>(problem.layout.row_bytes()));
    const auto bytes = static_cast<size_t>(size_of(index_query_type(format)));
    std::memset(problem.q_stored.data() + size_t{5 + 3} * 32 * bytes, 0xFF,
                bytes);  // row 1, head 3
    const std::vector<float> scores = problem.run(GetParam(), 1, problem.rows);
    for (int32_t s = 0; s < 61; ++s) EXPECT_EQ(std::isnan(scores[s]), s == 9) << s;
    for (int32_t s = 0; s < 62; ++s) EXPECT_TRUE(std::isnan(scores[problem.columns() + s])) << s;
  }
}

INSTANTIATE_TEST_SUITE_P(Levels, IndexScores, testing::ValuesIn(runnable_levels()),
                         [](const auto& level) { return std::string(name_of(level.param)); });

}  // namespace
}  // namespace fathom
