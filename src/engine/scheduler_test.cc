#include "engine/scheduler.h"

#include <gtest/gtest.h>

#include <deque>

namespace fathom {
namespace {

// Sequences that write token 0 until they have `max_len`, without a model.
class SchedulerTest : public testing::Test {
 protected:
  void make(int64_t num_pages, SchedulerOptions options) {
    pool_.emplace(num_pages);
    scheduler_.emplace(options, *pool_);
  }

  Sequence& add(int64_t prompt, int64_t max_tokens) {
    Sequence& sequence = sequences_.emplace_back();
    sequence.arrival = sequences_.size();
    sequence.tokens.resize(static_cast<size_t>(prompt));
    sequence.prompt_len = prompt;
    sequence.max_len = prompt + max_tokens;
    scheduler_->add(sequence);
    return sequence;
  }

  // One step; returns (arrival, tokens) of each entry.
  std::vector<std::pair<uint64_t, int64_t>> step() {
    scheduler_->schedule(plan_);
    std::vector<std::pair<uint64_t, int64_t>> entries;
    for (const StepEntry& entry : plan_.entries) {
      entries.emplace_back(entry.sequence->arrival, entry.num_tokens);
    }
    scheduler_->advance(plan_);
    for (const StepEntry& entry : plan_.entries) {
      if (!entry.samples) continue;
      entry.sequence->tokens.push_back(0);
      if (entry.sequence->len() == entry.sequence->max_len) scheduler_->finish(*entry.sequence);
    }
    pool_->check_invariant();
    return entries;
  }

  using Entries = std::vector<std::pair<uint64_t, int64_t>>;
  std::optional<PagePool> pool_;
  std::optional<Scheduler> scheduler_;
  std::deque<Sequence> sequences_;
  StepPlan plan_;
};

TEST_F(SchedulerTest, DecodeFirstThenChunksInOrderOfArrival) {
  make(100, {.max_num_seqs = 8, .max_batched_tokens = 50, .max_prompt_logit_rows = 1});
  add(10, 9);
  EXPECT_EQ(step(), (Entries{{1, 10}}));
  add(70, 9);
  add(30, 9);
  EXPECT_EQ(step(), (Entries{{1, 1}, {2, 49}})) << "the budget is used up";
  EXPECT_EQ(step(), (Entries{{1, 1}, {2, 21}, {3, 28}}));
  EXPECT_EQ(step(), (Entries{{1, 1}, {2, 1}, {3, 2}}));
  EXPECT_EQ(step(), (Entries{{1, 1}, {2, 1}, {3, 1}}));
}

TEST_F(SchedulerTest, AdmitsUpToMaxNumSeqs) {
  make(100, {.max_num_seqs = 2, .max_batched_tokens = 50, .max_prompt_logit_rows = 1});
  add(5, 1);
  add(5, 3);
  add(5, 3);
  EXPECT_EQ(step(), (Entries{{1, 5}, {2, 5}}));
  EXPECT_EQ(step(), (Entries{{2, 1}, {3, 5}}));
}

TEST_F(SchedulerTest, AdmitsOnlyWhenThePromptsPagesAreFree) {
  make(4, {.max_num_seqs = 8, .max_batched_tokens = 1000, .max_prompt_logit_rows = 1});
  add(100, 10);
  add(200, 10);
  add(10, 10);
  EXPECT_EQ(step(), (Entries{{1, 100}})) << "the second needs 4 pages, and nobody passes it";
  for (int i = 0; i < 9; ++i) EXPECT_EQ(step(), (Entries{{1, 1}}));
  EXPECT_EQ(step(), (Entries{{2, 200}}));
}

TEST_F(SchedulerTest, LatestArrivalIsPreemptedAndComputedAgain) {
  make(4, {.max_num_seqs = 8, .max_batched_tokens = 1000, .max_prompt_logit_rows = 1});
  add(120, 100);
  Sequence& second = add(120, 100);
  EXPECT_EQ(step(), (Entries{{1, 120}, {2, 120}}));
  for (int i = 0; i < 8; ++i) EXPECT_EQ(step(), (Entries{{1, 1}, {2, 1}}));
  // Both are 129 tokens long with 128 in two pages each.
  EXPECT_EQ(step(), (Entries{{1, 1}}));
  EXPECT_EQ(second.phase, Sequence::Phase::kWaiting);
  EXPECT_TRUE(second.pages.empty());
  EXPECT_EQ(second.usage.preemptions, 1);
  while (sequences_[0].phase != Sequence::Phase::kFinished) step();
  EXPECT_EQ(step(), (Entries{{2, 129}})) << "prompt and output are computed again";
}

TEST_F(SchedulerTest, PromptLogitsAreBoundedAStepAndNeverAskedForTwice) {
  make(100, {.max_num_seqs = 8, .max_batched_tokens = 50, .max_prompt_logit_rows = 8});
  Sequence& first = add(20, 5);
  first.prompt_logits_end = 19;
  add(10, 5);
  std::vector<int64_t> positions;
  for (int i = 0; i < 10; ++i) {
    scheduler_->schedule(plan_);
    if (i == 1) {
      EXPECT_EQ(plan_.entries.size(), 2u) << "the other prompt is not held up";
    }
    int64_t wanted = 0;
    for (const StepEntry& entry : plan_.entries) {
      wanted += entry.num_prompt_logits;
      for (int64_t p = 0; p < entry.num_prompt_logits; ++p) {
        positions.push_back(entry.first_prompt_logit + p);
      }
      if (entry.num_prompt_logits > 0) {
        EXPECT_GE(entry.first_prompt_logit, first.computed);
        EXPECT_LE(entry.first_prompt_logit + entry.num_prompt_logits,
                  first.computed + entry.num_tokens);
      }
    }
    EXPECT_LE(wanted, 8);
    scheduler_->advance(plan_);
    for (const StepEntry& entry : plan_.entries) {
      if (entry.samples) entry.sequence->tokens.push_back(0);
    }
  }
  ASSERT_EQ(positions.size(), 19u);
  for (int64_t i = 0; i < 19; ++i) EXPECT_EQ(positions[static_cast<size_t>(i)], i);
}

TEST_F(SchedulerTest, ForkSharesFullPagesOfThePrompt) {
  make(100, {.max_num_seqs = 8, .max_batched_tokens = 100, .max_prompt_logit_rows = 1});
  Sequence& source = add(150, 5);
  Sequence& fork = add(150, 5);
  add(10, 5);
  fork.fork_source = &source;
  EXPECT_EQ(step(), (Entries{{1, 100}}));
  EXPECT_EQ(step(), (Entries{{1, 50}, {3, 10}})) << "the fork waits for the pages, others pass";
  EXPECT_EQ(step(), (Entries{{1, 1}, {3, 1}, {2, 22}}));
  EXPECT_EQ(fork.pages[0], source.pages[0]);
  EXPECT_EQ(fork.pages[1], source.pages[1]);
  EXPECT_NE(fork.pages[2], source.pages[2]);
  EXPECT_EQ(fork.usage.cached_tokens, 128);
  scheduler_->finish(source);
  EXPECT_EQ(pool_->holders(fork.pages[0]), 1);
  while (scheduler_->has_work()) step();
  EXPECT_EQ(pool_->used(), 0);
}

TEST(SchedulerDeathTest, FinishingTwiceIsFatal) {
  PagePool pool(4);
  Scheduler scheduler({.max_num_seqs = 1, .max_batched_tokens = 8, .max_prompt_logit_rows = 1},
                      pool);
  Sequence sequence;
  sequence.arrival = 1;
  sequence.tokens = {1};
  scheduler.add(sequence);
  scheduler.finish(sequence);
  EXPECT_DEATH(scheduler.finish(sequence), "ends twice");
}

}  // namespace
}  // namespace fathom
