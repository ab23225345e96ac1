#include "ops/indexer/sparse_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

namespace fathom {
namespace {

// A batch with these contexts and numbers of new tokens.
struct TestBatch {
  std::vector<int32_t> query_start = {0};
  std::vector<int32_t> contexts;
  std::vector<int32_t> all;
  int32_t first_key = 0;

  TestBatch(const std::vector<int32_t>& context_lens, const std::vector<int32_t>& queries)
      : contexts(context_lens) {
    for (size_t s = 0; s < queries.size(); ++s) {
      query_start.push_back(query_start.back() + queries[s]);
      all.push_back(static_cast<int32_t>(s));
    }
  }
  PagedBatch view() const { return {query_start, contexts, {}, 0, {}, first_key}; }
};

SparseLimits plan_limits(int64_t dense_keys, int64_t top_keys = 2048) {
  SparseLimits limits;
  limits.top_keys = top_keys;
  limits.dense_keys = dense_keys;
  return limits;
}

// Draft windows across the threshold: each row by its own length.
TEST(SparsePlan, ARowIsDenseByItsOwnLength) {
  const TestBatch batch({2046, 5, 2047, 4000}, {4, 1, 2, 1});
  const SparsePlan plan = plan_sparse_rows(batch.view(), batch.all, plan_limits(2048));
  EXPECT_EQ(plan.dense,
            (std::vector<SparseRow>{{0, 0, 2047}, {1, 0, 2048}, {4, 1, 6}, {5, 2, 2048}}));
  EXPECT_EQ(plan.scored,
            (std::vector<SparseRow>{{2, 0, 2049}, {3, 0, 2050}, {6, 2, 2049}, {7, 3, 4001}}));
  EXPECT_FALSE(plan.is_short());
}

TEST(SparsePlan, HiddenKeysDoNotCount) {
  TestBatch batch({2048, 2049}, {1, 1});
  batch.first_key = 1;
  const SparsePlan plan = plan_sparse_rows(batch.view(), batch.all, plan_limits(2048));
  EXPECT_EQ(plan.dense, (std::vector<SparseRow>{{0, 0, 2049}}));
  EXPECT_EQ(plan.scored, (std::vector<SparseRow>{{1, 1, 2050}}));
}

TEST(SparsePlan, OnlyTheListedSequences) {
  const TestBatch batch({10, 3000, 20}, {2, 1, 1});
  const std::vector<int32_t> listed = {2, 1};
  const SparsePlan plan = plan_sparse_rows(batch.view(), listed, plan_limits(2048));
  EXPECT_EQ(plan.dense, (std::vector<SparseRow>{{3, 2, 21}}));
  EXPECT_EQ(plan.scored, (std::vector<SparseRow>{{2, 1, 3001}}));
}

TEST(SparsePlan, AThresholdOfNothingScoresEveryRow) {
  const TestBatch batch({0}, {3});
  const SparsePlan plan = plan_sparse_rows(batch.view(), batch.all, plan_limits(0));
  EXPECT_TRUE(plan.dense.empty());
  EXPECT_EQ(plan.scored, (std::vector<SparseRow>{{0, 0, 1}, {1, 0, 2}, {2, 0, 3}}));
}

// However a prompt is cut into steps, the same rows choose.
TEST(SparsePlan, CuttingChangesNoRow) {
  const SparseLimits limits = plan_limits(64, 64);
  for (const int32_t chunk : {1, 13, 50, 130}) {
    for (int32_t begin = 0; begin < 130; begin += chunk) {
      const TestBatch batch({begin}, {std::min(chunk, 130 - begin)});
      const SparsePlan plan = plan_sparse_rows(batch.view(), batch.all, limits);
      for (const SparseRow& row : plan.dense) EXPECT_LE(row.length, 64);
      for (const SparseRow& row : plan.scored) EXPECT_GT(row.length, 64);
      EXPECT_EQ(std::ssize(plan.dense) + std::ssize(plan.scored), batch.query_start[1]);
      EXPECT_EQ(plan.is_short(), begin + batch.query_start[1] <= 64);
    }
  }
}

TEST(SparsePlan, PassesStayWithinTheirBudget) {
  SparseLimits limits = plan_limits(0, 16);
  const TestBatch batch({1000, 60, 131'071, 90}, {700, 3, 1, 40});
  for (const int64_t bytes : {int64_t{1} << 20, int64_t{4} * 131'072, int64_t{64} << 20}) {
    limits.score_bytes = bytes;
    ASSERT_TRUE(check_sparse_limits(limits, 131'072).has_value());
    const SparsePlan plan = plan_sparse_rows(batch.view(), batch.all, limits);
    int64_t next = 0;
    for (const ScorePass& pass : plan.passes) {
      EXPECT_EQ(pass.first, next);
      EXPECT_GT(pass.count, 0);
      EXPECT_EQ(pass.columns % 16, 0);
      EXPECT_LE(pass.count * pass.columns * 4, bytes);
      EXPECT_LE(pass.count * pass.columns, score_buffer_floats(limits, 744, 131'072));
      for (int64_t i = next; i < next + pass.count; ++i) {
        EXPECT_LE(plan.scored[i].length, pass.columns);
      }
      next += pass.count;
    }
    EXPECT_EQ(next, 744);
    EXPECT_LE(score_buffer_floats(limits, 744, 131'072) * 4, bytes);
  }
}

// A chunk of 4,096 rows at 128K keys: the scores would take 2.1 GB at once.
TEST(SparsePlan, LongChunksDoNotTakeMoreThanTheBudget) {
  const TestBatch batch({126'976}, {4096});
  const SparsePlan plan = plan_sparse_rows(batch.view(), batch.all, plan_limits(2048));
  EXPECT_EQ(std::ssize(plan.scored), 4096);
  for (const ScorePass& pass : plan.passes) EXPECT_LE(pass.count * pass.columns * 4, 64 << 20);
  EXPECT_EQ(score_buffer_floats(plan_limits(2048), 4096, 131'072), 16 << 20);
  EXPECT_EQ(score_buffer_floats(plan_limits(2048), 2, 100), 2 * 112);
}

TEST(SparsePlan, ABudgetIsRaisedToOnePassOfAFewRows) {
  const auto raised = [](int64_t rows, int64_t max_length) {
    SparseLimits limits = plan_limits(2048);
    fit_one_pass(limits, rows, max_length);
    return limits.score_bytes;
  };
  EXPECT_EQ(raised(1, 1000), 64 << 20);  // never lowered
  EXPECT_EQ(raised(128, 160 << 10), 80 << 20);
  EXPECT_EQ(raised(128, (160 << 10) - 15), 80 << 20);
  EXPECT_EQ(raised(512, 160 << 10), 256 << 20);
}

// The host of a GPU knows upper bounds: the short graph is for steps in which no row can choose.
TEST(SparsePlan, TheShortGraphNeedsEveryRowWithinTheThreshold) {
  EXPECT_TRUE(takes_short_graph(2048, 0, plan_limits(2048)));
  EXPECT_FALSE(takes_short_graph(2049, 0, plan_limits(2048)));
  EXPECT_TRUE(takes_short_graph(2049, 1, plan_limits(2048)));
  EXPECT_FALSE(takes_short_graph(1, 0, plan_limits(0)));
  for (int32_t context = 2040; context < 2052; ++context) {
    for (int32_t window = 1; window <= 4; ++window) {
      const TestBatch batch({context, 7}, {window, 1});
      EXPECT_EQ(takes_short_graph(context + window, 0, plan_limits(2048)),
                plan_sparse_rows(batch.view(), batch.all, plan_limits(2048)).is_short());
    }
  }
}

TEST(SparseLimitsCheck, NamesTheValueAndTheLimit) {
  const auto message = [](const SparseLimits& limits, int64_t length) {
    const auto result = check_sparse_limits(limits, length);
    return result ? std::string() : result.error().message;
  };
  EXPECT_EQ(message(plan_limits(2048), 131'072), "");
  EXPECT_EQ(message(plan_limits(0, 0), 100), "0 keys to choose: must be 1 or more");
  EXPECT_EQ(message(plan_limits(-1), 100),
            "a dense threshold of -1 keys: must be 0 to the 2048 keys that a row chooses");
  EXPECT_EQ(message(plan_limits(2049), 100),
            "a dense threshold of 2049 keys: must be 0 to the 2048 keys that a row chooses");
  SparseLimits small = plan_limits(16, 16);
  small.score_bytes = int64_t{4} * 111;
  EXPECT_EQ(message(small, 97), "444 bytes for index scores: a row of 97 keys takes 448");
}

}  // namespace
}  // namespace fathom
