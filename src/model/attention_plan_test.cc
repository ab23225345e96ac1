#include "model/attention_plan.h"

#include <gtest/gtest.h>

#include <random>

namespace fathom {
namespace {

ForwardBatch batch_of(const std::vector<std::pair<int32_t, int32_t>>& queries_and_contexts) {
  ForwardBatch batch;
  batch.max_pages = 3;
  batch.query_start.push_back(0);
  for (const auto& [queries, context] : queries_and_contexts) {
    batch.query_start.push_back(batch.query_start.back() + queries);
    batch.context_lens.push_back(context);
    for (int p = 0; p < 3; ++p) {
      batch.block_tables.push_back(static_cast<int32_t>(batch.block_tables.size()));
    }
  }
  batch.token_ids.resize(static_cast<size_t>(batch.query_start.back()));
  for (const auto& [queries, context] : queries_and_contexts) {
    for (int32_t row = 0; row < queries; ++row) batch.positions.push_back(context + row);
  }
  return batch;
}

TEST(AttentionPlan, DecodeIsAbsorbedAndAFreshPromptIsExpanded) {
  const AttentionShape shape;
  const AttentionPolicy policy;
  EXPECT_FALSE(prefers_mha(1, 0, shape, policy));
  EXPECT_FALSE(prefers_mha(1, 100'000, shape, policy));
  EXPECT_TRUE(prefers_mha(512, 0, shape, policy));
  // The arithmetic crossover after a long prefix: about 171 new tokens (512 * 256 / (1088 - 320)).
  EXPECT_FALSE(prefers_mha(160, 1'000'000, shape, policy));
  EXPECT_TRUE(prefers_mha(180, 1'000'000, shape, policy));
}

// One sequence on an H200 takes the cheaper form of bench/results/attention_forms_h200.json
// wherever the two differ by more than 2 % of a step.
TEST(AttentionPlan, TakesTheFasterFormOnAGpu) {
  const AttentionShape shape;
  const AttentionPolicy policy = gpu_attention_policy();
  for (const int64_t queries : {8, 128, 1024})
    EXPECT_TRUE(prefers_mha(queries, 256, shape, policy));
  EXPECT_FALSE(prefers_mha(16, 1024, shape, policy));
  EXPECT_TRUE(prefers_mha(256, 1024, shape, policy));
  EXPECT_FALSE(prefers_mha(256, 4096, shape, policy));
  EXPECT_TRUE(prefers_mha(512, 4096, shape, policy));
  for (const int64_t context : {16'384, 65'536}) {
    EXPECT_FALSE(prefers_mha(256, context, shape, policy));
    EXPECT_TRUE(prefers_mha(512, context, shape, policy));
  }
}

TEST(AttentionPlan, FormCanBeForced) {
  AttentionPolicy policy;
  policy.form = AttentionForm::kAbsorbed;
  EXPECT_FALSE(prefers_mha(512, 0, AttentionShape(), policy));
  policy.form = AttentionForm::kMha;
  EXPECT_TRUE(prefers_mha(1, 9, AttentionShape(), policy));
}

// Every row is in exactly one group or multi-head sequence, groups keep to the row limit, and a
// group's own arrays describe the same positions and pages as the batch's.
TEST(AttentionPlan, CoversEveryRowOnce) {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    std::vector<std::pair<int32_t, int32_t>> sequences(1 + random() % 20);
    for (auto& [queries, context] : sequences) {
      queries = random() % 3 == 0 ? 1 + static_cast<int32_t>(random() % 300) : 1;
      context = static_cast<int32_t>(random() % 1000);
    }
    const ForwardBatch batch = batch_of(sequences);
    AttentionPolicy policy;
    policy.max_absorbed_rows = 64;
    policy.form = round % 2 == 0 ? AttentionForm::kAuto : AttentionForm::kAbsorbed;
    const AttentionPlan plan = plan_attention(batch, AttentionShape(), policy);
    std::vector<int> seen(batch.token_ids.size(), 0);
    for (const MhaRows& mha : plan.mha) {
      EXPECT_EQ(mha.rows, batch.query_start[mha.sequence + 1] - batch.query_start[mha.sequence]);
      for (int32_t row = 0; row < mha.rows; ++row) ++seen[batch.query_start[mha.sequence] + row];
    }
    for (const AbsorbedGroup& group : plan.absorbed) {
      EXPECT_LE(group.rows, policy.max_absorbed_rows);
      const PagedBatch view = group.view(batch);
      ASSERT_EQ(view.num_sequences(), static_cast<int64_t>(group.sequences.size()));
      for (int64_t i = 0; i < view.num_sequences(); ++i) {
        const int64_t s = group.first_sequence + i;
        for (int32_t row = 0; row < view.num_queries(i); ++row) {
          const int64_t batch_row = group.first_row + view.query_start[i] + row;
          ++seen[batch_row];
          EXPECT_EQ(view.context_lens[i] + row,
                    batch.context_lens[s] + batch_row - batch.query_start[s]);
        }
        EXPECT_EQ(view.pages(i)[0], static_cast<int32_t>(s * 3));
      }
    }
    EXPECT_EQ(seen, std::vector<int>(seen.size(), 1));
  }
}

// With sparse attention: a row is among those that choose exactly when it sees more keys than the
// threshold, whatever else the step has, and every row is computed once.
TEST(AttentionPlan, RowsChooseByTheirOwnLength) {
  std::mt19937 random(11);
  for (int round = 0; round < 300; ++round) {
    const int32_t first_key = round % 5 == 0 ? 1 : 0;
    std::vector<std::pair<int32_t, int32_t>> sequences(1 + random() % 12);
    for (auto& [queries, context] : sequences) {
      queries = random() % 2 == 0 ? 1 + static_cast<int32_t>(random() % 90) : 1;
      context = first_key + static_cast<int32_t>(random() % 100);
    }
    const ForwardBatch batch = batch_of(sequences);
    AttentionPolicy policy;
    policy.max_absorbed_rows = 32;
    policy.form = round % 3 == 0 ? AttentionForm::kMha : AttentionForm::kAuto;
    AttentionShape shape;
    shape.sparse = SparseLimits{.top_keys = 64, .dense_keys = 64 - round % 4 * 20};
    const AttentionPlan plan = plan_attention(batch, shape, policy, first_key);
    std::vector<int> dense(batch.token_ids.size(), 0), chosen(batch.token_ids.size(), 0);
    for (const MhaRows& mha : plan.mha) {
      for (int32_t row = 0; row < mha.rows; ++row) ++dense[batch.query_start[mha.sequence] + row];
    }
    int64_t scored = 0;
    for (const AbsorbedGroup& group : plan.absorbed) {
      EXPECT_LE(group.rows, policy.max_absorbed_rows);
      EXPECT_EQ(group.scored.first, scored);
      scored += group.scored.count;
      const PagedBatch view = group.view(batch);
      for (const int32_t i : group.sequences) {
        for (int32_t row = 0; row < view.num_queries(i); ++row) {
          const int64_t batch_row = group.first_row + view.query_start[i] + row;
          ++dense[batch_row];
          EXPECT_EQ(view.context_lens[i] + row, batch.positions[batch_row]);
        }
        EXPECT_EQ(view.pages(i)[0], static_cast<int32_t>((group.first_sequence + i) * 3));
      }
      for (int64_t i = group.scored.first; i < group.scored.end(); ++i) {
        const SparseRow& row = plan.scored[static_cast<size_t>(i)];
        ++chosen[row.row];
        EXPECT_EQ(row.length, batch.positions[row.row] + 1);
        EXPECT_GE(row.row, group.first_row);
        EXPECT_LT(row.row, group.first_row + group.rows);
      }
    }
    EXPECT_EQ(scored, std::ssize(plan.scored));
    for (size_t row = 0; row < dense.size(); ++row) {
      const bool chooses = batch.positions[row] + 1 - first_key > shape.sparse->dense_keys;
      ASSERT_EQ(dense[row], chooses ? 0 : 1) << round << ": " << row;
      ASSERT_EQ(chosen[row], chooses ? 1 : 0) << round << ": " << row;
    }
  }
}

TEST(AttentionPlan, JoinsQueryRunsOverShortGaps) {
  const auto runs = [](const std::vector<int32_t>& rows) {
    std::vector<SparseRow> scored;
    scored.reserve(rows.size());
    for (const int32_t row : rows) scored.push_back({.row = row, .sequence = 0, .length = 1});
    return query_runs(scored);
  };
  EXPECT_TRUE(runs({}).empty());
  EXPECT_EQ(runs({3}), (std::vector<Slice>{{3, 1}}));
  EXPECT_EQ(runs({3, 4, 20}), (std::vector<Slice>{{3, 18}}));
  EXPECT_EQ(runs({3, 4, 22}), (std::vector<Slice>{{3, 2}, {22, 1}}));
}

}  // namespace
}  // namespace fathom
