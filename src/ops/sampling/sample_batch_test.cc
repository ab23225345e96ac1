#include "ops/sampling/sample_batch.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

namespace fathom {
namespace {

TEST(SampleBatch, RowsBecomeFlatArrays) {
  SampleBatch batch(100);  // 4 words of a mask
  const SampleOptions plain{.temperature = 0};
  const SampleOptions drawn{.temperature = 0.5,
                            .top_p = 0.9,
                            .min_p = 0.1,
                            .top_k = 7,
                            .presence_penalty = 1,
                            .logit_bias = {{3, 1.5f}, {9, -2.0f}},
                            .seed = 4,
                            .stream = 2};
  TokenHistory history;
  history.add_prompt(std::vector<int32_t>{7, 8, 7});
  history.add_output(8);
  const int32_t masked_before[] = {1, 2}, masked[] = {5, 6, 7};
  const uint32_t too_many_words[] = {1, 2, 3, 4, 5}, too_few[] = {~0u};
  batch.add({.row = 3,
             .options = &plain,
             .masked = masked_before,
             .allowed = too_few,
             .num_logprobs = 2});
  batch.add_padding();
  batch.add({.row = 1,
             .options = &drawn,
             .history = &history,
             .masked = masked,
             .allowed = too_many_words,
             .position = 11});
  ASSERT_EQ(batch.rows().size(), 3u);
  const DeviceSampleRow &first = batch.rows()[0], &padding = batch.rows()[1],
                        &last = batch.rows()[2];
  EXPECT_EQ(first.row, 3);
  EXPECT_EQ(first.inverse_temperature, 0);
  EXPECT_EQ(first.allowed_row, 0);
  EXPECT_EQ(first.num_logprobs, 2);
  EXPECT_EQ(first.num_seen, 0);
  EXPECT_EQ(padding.row, -1);
  EXPECT_EQ(last.row, 1);
  EXPECT_EQ(last.inverse_temperature, 2);
  EXPECT_EQ(last.noise.stream, noise_key(4, 2, 11).stream);
  EXPECT_EQ(last.noise.position, 11u);
  EXPECT_EQ(last.top_k, 7);
  EXPECT_EQ(last.top_p, 0.9);
  EXPECT_EQ(last.min_p_depth, 0.5 * std::log(0.1));
  EXPECT_TRUE(last.has_min_p);
  EXPECT_EQ(last.presence_penalty, 1);
  ASSERT_EQ(last.num_seen, 2);
  EXPECT_EQ(batch.seen()[last.first_seen].id, 7);
  EXPECT_EQ(batch.seen()[last.first_seen].output_count, 0);
  EXPECT_EQ(batch.seen()[last.first_seen + 1].output_count, 1);
  EXPECT_EQ(last.allowed_row, 1);
  EXPECT_EQ(last.num_biases, 2);
  EXPECT_EQ(first.num_masked, 2);
  EXPECT_EQ(batch.masked_ids()[first.first_masked], 1);
  EXPECT_EQ(last.num_masked, 3);
  EXPECT_EQ(batch.bias_ids()[last.first_bias + 1], 9);
  EXPECT_EQ(batch.bias_values()[last.first_bias + 1], -2);
  EXPECT_EQ(batch.masked_ids()[last.first_masked], 5);
  EXPECT_EQ(std::vector(batch.allowed().begin(), batch.allowed().end()),
            (std::vector<uint32_t>{~0u, 0, 0, 0, 1, 2, 3, 4}));
  batch.clear();
  EXPECT_TRUE(batch.rows().empty() && batch.bias_ids().empty() && batch.seen().empty() &&
              batch.allowed().empty());
}

TEST(SampleBatch, GivenTokensNeedNoOptions) {
  SampleBatch batch(100);
  batch.add({.row = 5, .num_logprobs = 3, .given_id = 42});
  const DeviceSampleRow& row = batch.rows().back();
  EXPECT_EQ(row.row, 5);
  EXPECT_EQ(row.given_id, 42);
  EXPECT_EQ(row.num_logprobs, 3);
  EXPECT_EQ(row.num_biases + row.num_seen + row.num_masked, 0);
}

TEST(SampleBatch, DraftsHaveTheDrawAndNothingElse) {
  const SampleOptions options{.temperature = 0.5,
                              .top_p = 0.9,
                              .min_p = 0.1,
                              .top_k = 7,
                              .presence_penalty = 1,
                              .logit_bias = {{3, 1.5f}},
                              .seed = 4,
                              .stream = 2};
  SampleBatch batch(100);
  batch.add_draft(6, options, 11);
  batch.add_draft(7, {.temperature = 0}, 11);
  const DeviceSampleRow &drawn = batch.rows()[0], &greedy = batch.rows()[1];
  EXPECT_EQ(drawn.row, 6);
  EXPECT_EQ(drawn.inverse_temperature, 2);
  EXPECT_EQ(drawn.noise.stream, noise_key(4, 2, 11).stream);
  EXPECT_EQ(drawn.noise.position, 11u);
  EXPECT_EQ(drawn.top_p, 1);
  EXPECT_EQ(drawn.top_k, 0);
  EXPECT_EQ(drawn.has_min_p, 0);
  EXPECT_EQ(drawn.num_biases + drawn.num_seen + drawn.num_masked, 0);
  EXPECT_EQ(drawn.num_logprobs, -1);
  EXPECT_EQ(greedy.row, 7);
  EXPECT_EQ(greedy.inverse_temperature, 0);
}

TEST(SampleBatch, TopKOfTheWholeVocabularyIsNone) {
  SampleBatch batch(100);
  for (const int64_t top_k : {int64_t{-1}, int64_t{0}, int64_t{100}, INT64_MAX}) {
    const SampleOptions options{.top_k = top_k};
    batch.add({.options = &options});
    EXPECT_EQ(batch.rows().back().top_k, 0);
  }
}

TEST(SampleBatch, GroupsRowsBySeenTokensInTheirOrder) {
  const SampleOptions options{.temperature = 1, .presence_penalty = 0.5f};
  const SampleOptions plain;
  std::vector<int32_t> some(30), more(50);
  std::iota(some.begin(), some.end(), 0);
  std::iota(more.begin(), more.end(), 10);
  TokenHistory histories[4];
  histories[0].add_prompt(some);
  histories[1].add_prompt(more);
  histories[2].add_prompt(some);
  SampleBatch batch(100);
  batch.add({.options = &plain});
  for (const TokenHistory& history : histories) {
    batch.add({.options = &options, .history = &history});
  }
  for (const int64_t most : {1, 30, 50, 80, 109, 110, 1000}) {
    int64_t row = 0, seen = 0;
    while (row < std::ssize(batch.rows())) {
      const SampleBatch::Group group = batch.group_from(row, most);
      EXPECT_EQ(group.first_row, row);
      ASSERT_GE(group.num_rows, 1);
      if (group.num_seen > 0) {
        EXPECT_EQ(group.first_seen, seen);
      }
      EXPECT_TRUE(group.num_seen <= most || group.num_rows == 1) << most;
      for (int64_t i = row; i < row + group.num_rows; ++i) {
        seen += batch.rows()[static_cast<size_t>(i)].num_seen;
      }
      row += group.num_rows;
    }
    EXPECT_EQ(seen, std::ssize(batch.seen()));
  }
  EXPECT_EQ(batch.group_from(0, 1000).num_rows, 5);
}

}  // namespace
}  // namespace fathom
