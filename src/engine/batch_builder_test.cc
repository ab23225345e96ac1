#include "engine/batch_builder.h"

#include <gtest/gtest.h>

#include <vector>

#include "engine/sequence.h"

namespace fathom {
namespace {

// Two lanes: one with the logits of two prompt tokens and a sampled one, one with a chunk that
// samples nothing and a greedy sequence.
TEST(BatchBuilder, SaysWhichLogitRowsNeedTheirLargestOnly) {
  std::vector<Sequence> sequences(3);
  for (Sequence& sequence : sequences) {
    sequence.tokens = {5, 6, 7};
    sequence.prompt_len = 3;
    sequence.pages = {0};
  }
  StepPlan plan;
  plan.entries = {
      {.sequence = &sequences[0],
       .num_tokens = 3,
       .first_prompt_logit = 0,
       .num_prompt_logits = 2,
       .samples = true},
      {.sequence = &sequences[1], .num_tokens = 2},
      {.sequence = &sequences[2], .num_tokens = 3, .samples = true},
  };
  plan.lane_ends = {1, 3};
  const SampleOptions greedy = {.temperature = 0};
  const std::vector<SampleRow> rows = {{.num_logprobs = 0, .given_id = 6},
                                       {.num_logprobs = 0, .given_id = 7},
                                       {.options = &greedy},
                                       {.options = &greedy}};
  BatchBuilder builder;
  for (int round = 0; round < 2; ++round) {
    const auto batches = builder.build(plan, rows);
    ASSERT_EQ(batches.size(), 2);
    EXPECT_EQ(batches[0].logit_rows, (std::vector<int32_t>{0, 1, 2}));
    EXPECT_EQ(batches[0].largest_only, (std::vector<int32_t>{2}));
    EXPECT_EQ(batches[1].logit_rows, (std::vector<int32_t>{4}));
    EXPECT_EQ(batches[1].largest_only, (std::vector<int32_t>{0}));
  }
}

}  // namespace
}  // namespace fathom
