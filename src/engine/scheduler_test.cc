#include "engine/scheduler.h"

#include <gtest/gtest.h>

#include <deque>

namespace fathom {
namespace {

// A device whose copies end at every second poll. The pages' bytes are never read.
class SlowCopies : public PageTransfer {
 public:
  int64_t page_bytes() const override { return 8; }
  void save(int32_t, std::byte*, int32_t id) override { begun_.push_back({id, true}); }
  void load(const std::byte*, int32_t, int32_t id) override { begun_.push_back({id, true}); }
  void take_ended(std::vector<EndedCopy>& ended, bool wait) override {
    ended.clear();
    if (wait || ++polls_ % 2 == 0) std::swap(ended, begun_);
  }

 private:
  std::vector<EndedCopy> begun_;
  int64_t polls_ = 0;
};

// Sequences that generate token 0 up to `max_len`, without a model.
class SchedulerTest : public testing::Test {
 protected:
  void make(int64_t num_pages, SchedulerOptions options) {
    pool_.emplace(num_pages);
    options.long_prompt_rows = options.max_batched_tokens / 4;
    tree_.emplace(*pool_, /*retain=*/true);
    scheduler_.emplace(options, *tree_);
  }

  // With host memory for twice as many pages, and copies that take their time.
  void make_with_store(int64_t num_pages, SchedulerOptions options) {
    pool_.emplace(num_pages);
    options.long_prompt_rows = options.max_batched_tokens / 4;
    auto store = PageStore::create({.host_bytes = 2 * num_pages * copies_.page_bytes()}, copies_);
    ASSERT_TRUE(store) << store.error().message;
    store_ = std::move(*store);
    tree_.emplace(*pool_, /*retain=*/true, store_.get());
    scheduler_.emplace(options, *tree_);
  }

  Sequence& add(int64_t prompt, int64_t max_tokens, int32_t priority = 0) {
    Sequence& sequence = make_sequence(prompt, max_tokens);
    sequence.priority = priority;
    scheduler_->add(sequence);
    return sequence;
  }

  // Sequences share the prefix up to `differs_at`; later tokens are their own.
  Sequence& add_sharing(int64_t prompt, int64_t max_tokens, int64_t differs_at,
                        int32_t priority = 0) {
    Sequence& sequence = make_sequence(prompt, max_tokens);
    for (int64_t i = differs_at; i < prompt; ++i) {
      sequence.tokens[i] = static_cast<int32_t>(sequence.arrival);
    }
    sequence.priority = priority;
    sequence.prefix = tree_->chain(0, "");
    scheduler_->add(sequence);
    return sequence;
  }

  Sequence& make_sequence(int64_t prompt, int64_t max_tokens) {
    Sequence& sequence = sequences_.emplace_back();
    sequence.arrival = sequences_.size();
    sequence.tokens.resize(static_cast<size_t>(prompt));
    sequence.prompt_len = prompt;
    sequence.max_len = prompt + max_tokens;
    return sequence;
  }

  // Runs one step. Returns (arrival, num_tokens) of each entry.
  std::vector<std::pair<uint64_t, int64_t>> step() {
    plan_.clear();
    scheduler_->schedule(plan_);
    std::vector<std::pair<uint64_t, int64_t>> entries;
    for (const StepEntry& entry : plan_.entries) {
      entries.emplace_back(entry.sequence->arrival, entry.num_tokens);
    }
    scheduler_->advance(plan_.entries);
    for (const StepEntry& entry : plan_.entries) {
      if (!entry.samples) continue;
      entry.sequence->tokens.push_back(0);
      if (entry.sequence->len() == entry.sequence->max_len) scheduler_->finish(*entry.sequence);
    }
    tree_->check_invariant();
    return entries;
  }

  using Entries = std::vector<std::pair<uint64_t, int64_t>>;
  SlowCopies copies_;
  std::optional<PagePool> pool_;
  std::unique_ptr<PageStore> store_;
  std::optional<PrefixTree> tree_;
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
  // Both have 129 tokens, 128 of them in two pages each.
  EXPECT_EQ(step(), (Entries{{1, 1}}));
  EXPECT_EQ(second.phase, Sequence::Phase::kWaiting);
  EXPECT_TRUE(second.pages.empty());
  EXPECT_EQ(second.usage.preemptions, 1);
  while (sequences_[0].phase != Sequence::Phase::kFinished) step();
  EXPECT_EQ(step(), (Entries{{2, 129}})) << "prompt and output are computed again";
}

TEST_F(SchedulerTest, TheLastIsPreemptedAndNotTheNext) {
  make(6, {.max_num_seqs = 8, .max_batched_tokens = 1000, .max_prompt_logit_rows = 1});
  for (int i = 0; i < 3; ++i) add(120, 100);
  EXPECT_EQ(step(), (Entries{{1, 120}, {2, 120}, {3, 120}}));
  for (int i = 0; i < 8; ++i) EXPECT_EQ(step(), (Entries{{1, 1}, {2, 1}, {3, 1}}));
  // All three need a third page; the last one's two pages suffice for the other two.
  EXPECT_EQ(step(), (Entries{{1, 1}, {2, 1}}));
  EXPECT_EQ(sequences_[1].usage.preemptions, 0);
  EXPECT_EQ(sequences_[2].usage.preemptions, 1);
}

TEST_F(SchedulerTest, AdmissionLeavesRoomForTheFirstToken) {
  for (const int64_t max_tokens : {1, 2}) {
    make(4, {.max_num_seqs = 8, .max_batched_tokens = 1000, .max_prompt_logit_rows = 1});
    sequences_.clear();
    add(100, 10);
    EXPECT_EQ(step(), (Entries{{1, 100}}));
    // Two pages are full and two are free. A third is needed for any token but the last.
    Sequence& second = add(128, max_tokens);
    step();
    EXPECT_EQ(second.has_started, max_tokens == 1);
    while (scheduler_->has_work()) step();
    EXPECT_TRUE(second.has_started);
    EXPECT_EQ(second.usage.preemptions, 0) << "it would have been computed for nothing";
  }
}

TEST_F(SchedulerTest, AdmissionLeavesThePagesOfPromptsThatAreNotThroughYet) {
  make(16, {.max_num_seqs = 8, .max_batched_tokens = 100, .max_prompt_logit_rows = 1});
  add(1000, 2);  // all 16 pages, a few per step
  EXPECT_EQ(step(), (Entries{{1, 100}}));
  Sequence& second = add(10, 5);
  while (sequences_[0].phase != Sequence::Phase::kFinished) {
    step();
    EXPECT_EQ(second.has_started, false);
  }
  while (scheduler_->has_work()) step();
  EXPECT_EQ(second.usage.preemptions, 0);
}

TEST_F(SchedulerTest, AdmissionCountsTheCachedPagesThatItTakes) {
  make(5, {.max_num_seqs = 8, .max_batched_tokens = 1000, .max_prompt_logit_rows = 1});
  add_sharing(130, 1, 130);
  step();
  ASSERT_EQ(pool_->cached(), 2);
  add(100, 5);
  EXPECT_EQ(step(), (Entries{{2, 100}}));
  // Three pages are available, two of which are the two it would share. It needs five.
  Sequence& third = add_sharing(257, 2, 257);
  EXPECT_EQ(step(), (Entries{{2, 1}}));
  EXPECT_FALSE(third.has_started);
  while (sequences_[1].phase != Sequence::Phase::kFinished) step();
  EXPECT_EQ(step(), (Entries{{3, 129}}));
  EXPECT_EQ(third.usage.cached_tokens, 128);
}

TEST_F(SchedulerTest, PromptLogitsAreBoundedAStepAndNeverAskedForTwice) {
  make(100, {.max_num_seqs = 8, .max_batched_tokens = 50, .max_prompt_logit_rows = 8});
  Sequence& first = add(20, 5);
  first.prompt_logits_end = 19;
  add(10, 5);
  std::vector<int64_t> positions;
  for (int i = 0; i < 10; ++i) {
    plan_.clear();
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
    scheduler_->advance(plan_.entries);
    for (const StepEntry& entry : plan_.entries) {
      if (entry.samples) entry.sequence->tokens.push_back(0);
    }
  }
  ASSERT_EQ(positions.size(), 19u);
  for (int64_t i = 0; i < 19; ++i) EXPECT_EQ(positions[static_cast<size_t>(i)], i);
}

TEST_F(SchedulerTest, EqualPrefixesThatArriveTogetherAreComputedOnce) {
  make(100, {.max_num_seqs = 8, .max_batched_tokens = 100, .max_prompt_logit_rows = 1});
  Sequence& source = add_sharing(150, 5, 150);
  Sequence& fork = add_sharing(150, 5, 150);
  add(10, 5);
  EXPECT_EQ(step(), (Entries{{1, 100}}));
  EXPECT_EQ(step(), (Entries{{1, 50}, {3, 10}})) << "the second waits for the pages, others pass";
  EXPECT_EQ(step(), (Entries{{1, 1}, {3, 1}, {2, 22}}));
  EXPECT_EQ(fork.pages[0], source.pages[0]);
  EXPECT_EQ(fork.pages[1], source.pages[1]);
  EXPECT_NE(fork.pages[2], source.pages[2]);
  EXPECT_EQ(fork.usage.cached_tokens, 128);
  scheduler_->finish(source);
  EXPECT_EQ(pool_->holders(fork.pages[0]), 1);
  while (scheduler_->has_work()) step();
  EXPECT_EQ(pool_->used(), 0);
  EXPECT_EQ(pool_->cached(), 2);
}

TEST_F(SchedulerTest, WhoWaitsForPagesComputesThemWhenTheOtherStops) {
  make(100, {.max_num_seqs = 8, .max_batched_tokens = 300, .max_prompt_logit_rows = 1});
  Sequence& first = add_sharing(700, 5, 700);
  Sequence& second = add_sharing(700, 5, 500);
  EXPECT_EQ(step(), (Entries{{1, 75}})) << "a long prompt's share";
  EXPECT_EQ(step(), (Entries{{1, 75}}));
  EXPECT_TRUE(second.awaited.has_value());
  scheduler_->finish(first);
  EXPECT_EQ(step(), (Entries{{2, 300}})) << "from where the first has come to";
  EXPECT_EQ(second.usage.cached_tokens, 128);
  while (scheduler_->has_work()) step();
  EXPECT_EQ(pool_->used(), 0);
}

TEST_F(SchedulerTest, ThePreemptedFindsItsPagesAndOthersWaitForItAgain) {
  make(100, {.max_num_seqs = 8,
             .max_batched_tokens = 300,
             .max_prompt_logit_rows = 1,
             .preempt_every = 2});
  add(1, 50);
  add_sharing(600, 5, 600);
  Sequence& waiting = add_sharing(600, 5, 500);
  EXPECT_EQ(step(), (Entries{{1, 1}, {2, 299}}));
  EXPECT_EQ(step(), (Entries{{1, 1}})) << "the second is preempted; nobody is admitted just then";
  EXPECT_EQ(step(), (Entries{{1, 1}, {2, 299}})) << "after its four pages";
  EXPECT_EQ(step(), (Entries{{1, 1}}));
  EXPECT_EQ(step(), (Entries{{1, 1}, {2, 88}, {3, 152}}));
  EXPECT_EQ(waiting.usage.cached_tokens, 448);
  EXPECT_EQ(sequences_[1].usage.cached_tokens, 0) << "its own pages are no hit";
}

TEST_F(SchedulerTest, NobodyWaitsForPagesOfALowerPriority) {
  make(100, {.max_num_seqs = 8, .max_batched_tokens = 100, .max_prompt_logit_rows = 1});
  Sequence& low = add_sharing(192, 5, 192, 3);
  EXPECT_EQ(step(), (Entries{{1, 100}}));
  Sequence& high = add_sharing(192, 5, 192, -1);
  EXPECT_EQ(step(), (Entries{{1, 92}, {2, 8}})) << "what runs goes on, the budget's rest is left";
  EXPECT_EQ(high.usage.cached_tokens, 64);
  EXPECT_EQ(step(), (Entries{{1, 1}, {2, 99}}));
  EXPECT_EQ(step(), (Entries{{1, 1}, {2, 21}}));
  EXPECT_EQ(low.pages[1], high.pages[1]) << "computed twice, kept once";
}

TEST_F(SchedulerTest, WhoStopsLeavesOthersTheirPendingPages) {
  make(100, {.max_num_seqs = 8, .max_batched_tokens = 200, .max_prompt_logit_rows = 50});
  Sequence& low = add_sharing(390, 5, 390, 3);
  low.prompt_logits_end = 389;  // spreads its prompt over several steps and leaves room
  EXPECT_EQ(step(), (Entries{{1, 50}}));
  Sequence& high = add_sharing(390, 5, 390, -1);
  EXPECT_EQ(step(), (Entries{{1, 50}, {2, 150}})) << "the same pages, because it does not wait";
  scheduler_->finish(high);
  Sequence& third = add_sharing(390, 5, 390, 3);
  EXPECT_EQ(step(), (Entries{{1, 50}}));
  EXPECT_TRUE(third.awaited.has_value()) << "the first is still computing them";
}

// Its pages come back one after the other, so at first it counts as computing those that are left.
TEST_F(SchedulerTest, NobodyWaitsForPagesThatHaveComeBack) {
  make_with_store(4, {.max_num_seqs = 8, .max_batched_tokens = 1000, .max_prompt_logit_rows = 1});
  const auto run = [&](Sequence& sequence) {
    for (int i = 0; i < 100 && sequence.phase != Sequence::Phase::kFinished; ++i) step();
    EXPECT_EQ(sequence.phase, Sequence::Phase::kFinished);
  };
  run(add_sharing(200, 1, 200));
  run(add_sharing(256, 1, 0));  // another text, which fills the pool
  EXPECT_EQ(tree_->num_stored(), 3);
  run(add_sharing(200, 1, 200));
  EXPECT_EQ(tree_->num_returns(), 3);
  while (tree_->copies_in_flight() > 0) tree_->take_ended(true);
  tree_->clear();
  run(add_sharing(200, 1, 200));
}

// A step finds no room while a copy is in flight, and the copy ends before the step has looked at
// everything: nothing runs, and the next step does.
TEST_F(SchedulerTest, ACopyThatEndsWithinAStepLeavesItsRoomToTheNext) {
  make_with_store(8, {.max_num_seqs = 8, .max_batched_tokens = 1000, .max_prompt_logit_rows = 1});
  add_sharing(512, 1, 512);
  EXPECT_EQ(step(), (Entries{{1, 512}}));
  EXPECT_EQ(pool_->cached(), 8);
  add(10, 1);
  EXPECT_EQ(step(), Entries()) << "a page is being saved";
  EXPECT_EQ(tree_->copies_in_flight(), 0);
  EXPECT_EQ(step(), (Entries{{2, 10}}));
}

TEST_F(SchedulerTest, AHitNeverCoversTheWholePrompt) {
  make(100, {.max_num_seqs = 8, .max_batched_tokens = 200, .max_prompt_logit_rows = 1});
  for (const auto& [prompt, computed] :
       std::vector<std::pair<int64_t, int64_t>>{{128, 128}, {128, 64}, {129, 1}, {127, 63}}) {
    add_sharing(prompt, 1, prompt);
    EXPECT_EQ(step(), (Entries{{sequences_.size(), computed}}));
  }
}

TEST_F(SchedulerTest, PagesOfAnswersAreSharedOnlyIfTheyMayBe) {
  for (const bool share : {true, false}) {
    SCOPED_TRACE(share);
    make(100, {.max_num_seqs = 8,
               .max_batched_tokens = 500,
               .max_prompt_logit_rows = 1,
               .share_answers = share});
    Sequence& first = add_sharing(100, 100, 100);
    while (first.phase != Sequence::Phase::kFinished) step();
    EXPECT_EQ(pool_->cached(), share ? 3 : 1);
    Sequence& second = add_sharing(190, 10, 190);
    step();
    EXPECT_EQ(second.usage.cached_tokens, share ? 128 : 64);
    // A recomputed sequence does not reuse another's prompt for its own completion.
    while (second.len() < 195) step();
    Sequence& third = add_sharing(300, 1, 300);
    while (third.phase != Sequence::Phase::kFinished) step();
    scheduler_->finish(second);
    Sequence& fourth = make_sequence(250, 1);
    fourth.prompt_len = 100;  // the later tokens are its completion
    fourth.prefix = tree_->chain(0, "");
    scheduler_->add(fourth);
    step();
    EXPECT_EQ(fourth.usage.cached_tokens, share ? 192 : 64);
    while (scheduler_->has_work()) step();
    EXPECT_EQ(pool_->used(), 0);
  }
}

TEST_F(SchedulerTest, PromptLogitsAreComputedInSpiteOfHits) {
  make(100, {.max_num_seqs = 8, .max_batched_tokens = 500, .max_prompt_logit_rows = 500});
  add_sharing(300, 1, 300);
  step();
  Sequence& sequence = add_sharing(300, 5, 300);
  sequence.prompt_logits_end = 299;
  EXPECT_EQ(step(), (Entries{{2, 300}}));
  EXPECT_EQ(sequence.usage.cached_tokens, 0);
  EXPECT_EQ(pool_->used() + pool_->cached(), 5) << "four full pages, once, and the last";
}

TEST_F(SchedulerTest, PriorityComesBeforeArrival) {
  make(5, {.max_num_seqs = 8, .max_batched_tokens = 100, .max_prompt_logit_rows = 1});
  add(60, 20, 5);
  add(60, 20, 0);
  add(60, 20, -7);
  EXPECT_EQ(step(), (Entries{{3, 60}, {2, 40}}));
  EXPECT_EQ(step(), (Entries{{3, 1}, {2, 20}, {1, 60}}));
  Sequence& last = add(60, 20, 5);
  while (scheduler_->has_work()) step();
  EXPECT_GT(sequences_[0].usage.preemptions, 0) << "the first to arrive, of low priority";
  EXPECT_GT(last.usage.preemptions, 0);
  EXPECT_EQ(sequences_[1].usage.preemptions + sequences_[2].usage.preemptions, 0);
}

TEST_F(SchedulerTest, ALongPromptTakesItsShareWhileThereAreOthers) {
  make(1000, {.max_num_seqs = 8, .max_batched_tokens = 100, .max_prompt_logit_rows = 1});
  add(5000, 5);
  EXPECT_EQ(step(), (Entries{{1, 100}}));
  add(150, 3);
  add(20, 3);
  EXPECT_EQ(step(), (Entries{{2, 75}, {1, 25}}));
  EXPECT_EQ(step(), (Entries{{2, 75}, {1, 25}}));
  EXPECT_EQ(step(), (Entries{{2, 1}, {3, 20}, {1, 25}}));
  EXPECT_EQ(step(), (Entries{{2, 1}, {3, 1}, {1, 25}}));
  EXPECT_EQ(step(), (Entries{{3, 1}, {1, 25}}));
  for (int i = 0; i < kCompanySteps - 1; ++i) EXPECT_EQ(step(), (Entries{{1, 25}}));
  EXPECT_EQ(step(), (Entries{{1, 100}})) << "alone again";
}

TEST_F(SchedulerTest, ALongPromptThatLacksPagesIsPassedOnlySoOften) {
  make(40, {.max_num_seqs = 4, .max_batched_tokens = 100, .max_prompt_logit_rows = 1});
  add(1000, 1000);
  for (int i = 0; i < 10; ++i) step();
  Sequence& long_prompt = add(2400, 1);
  for (int i = 0; i < 6; ++i) add(10, 4);
  while (sequences_[0].phase != Sequence::Phase::kFinished) step();
  for (size_t i = 2; i < 8; ++i) {
    EXPECT_EQ(sequences_[i].has_started, i < 6) << "four, as many as run together, pass it: " << i;
  }
  EXPECT_FALSE(long_prompt.has_started);
  step();
  EXPECT_TRUE(long_prompt.has_started);
  EXPECT_TRUE(sequences_[7].has_started) << "and then the others";
}

TEST_F(SchedulerTest, LongPromptsTakeLessOfAStepTheLongerTheirContext) {
  make(40, {.max_num_seqs = 4,
            .max_batched_tokens = 64,
            .max_prompt_logit_rows = 1,
            .keys_worth_a_row = 100});
  add(1000, 2);
  EXPECT_EQ(step(), (Entries{{1, 64}})) << "alone: all rows";
  EXPECT_EQ(step(), (Entries{{1, 64}}));
  add(10, 3);
  // A budget of 16 rows' work; a row after 128 tokens costs 2.28.
  EXPECT_EQ(step(), (Entries{{2, 10}, {1, 7}}));
  EXPECT_EQ(step(), (Entries{{2, 1}, {1, 7}}));
  EXPECT_EQ(step(), (Entries{{2, 1}, {1, 7}}));
  for (int i = 0; i < kCompanySteps - 1; ++i) {
    const Entries entries = step();
    ASSERT_EQ(entries.size(), 1U);
    EXPECT_LE(entries[0].second, 7) << "company may come back";
    EXPECT_GE(entries[0].second, 1);
  }
  EXPECT_EQ(step(), (Entries{{1, 64}})) << "nobody did";
}

TEST_F(SchedulerTest, LongPromptsAmongThemselvesShareRows) {
  make(40, {.max_num_seqs = 4,
            .max_batched_tokens = 64,
            .max_prompt_logit_rows = 1,
            .keys_worth_a_row = 100});
  add(1000, 2);
  EXPECT_EQ(step(), (Entries{{1, 64}}));
  EXPECT_EQ(step(), (Entries{{1, 64}}));
  add(1000, 2);
  step();
  EXPECT_EQ(step(), (Entries{{1, 64}})) << "both are in their prompts: the first takes all";
  while (sequences_[0].remaining() > 1) step();
  EXPECT_EQ(step(), (Entries{{1, 1}, {2, 16}})) << "one decodes: 16 rows, whatever their context";
}

TEST_F(SchedulerTest, APromptIsLongByItsWork) {
  make(40, {.max_num_seqs = 4,
            .max_batched_tokens = 64,
            .max_prompt_logit_rows = 1,
            .keys_worth_a_row = 10});
  // 90 rows after 45 tokens on average cost 495 rows; two steps are 128.
  Sequence& sequence = add(90, 1);
  add(5, 1);
  EXPECT_EQ(step(), (Entries{{2, 5}, {1, 16}}));
  EXPECT_TRUE(sequence.is_long);
}

TEST(SchedulerDeathTest, FinishingTwiceIsFatal) {
  PagePool pool(4);
  PrefixTree tree(pool, /*retain=*/true);
  Scheduler scheduler({.max_num_seqs = 1, .max_batched_tokens = 8, .max_prompt_logit_rows = 1},
                      tree);
  Sequence sequence;
  sequence.arrival = 1;
  sequence.tokens = {1};
  scheduler.add(sequence);
  scheduler.finish(sequence);
  EXPECT_DEATH(scheduler.finish(sequence), "ends twice");
}

}  // namespace
}  // namespace fathom
