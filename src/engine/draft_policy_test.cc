#include "engine/draft_policy.h"

#include <gtest/gtest.h>

#include <vector>

namespace fathom {
namespace {

// Sequences that decode, each with up to 3 drafts.
struct Decoding {
  explicit Decoding(const std::vector<double>& acceptances) : sequences(acceptances.size()) {
    for (size_t i = 0; i < sequences.size(); ++i) {
      sequences[i].draft_acceptance = acceptances[i];
      entries.push_back(
          {.sequence = &sequences[i], .num_tokens = 1, .num_drafts = 3, .samples = true});
    }
  }
  std::vector<int64_t> chosen_by(const DraftPolicy& policy) {
    policy.choose(entries);
    std::vector<int64_t> drafts;
    for (const StepEntry& entry : entries) drafts.push_back(entry.num_drafts);
    return drafts;
  }
  std::vector<Sequence> sequences;
  std::vector<StepEntry> entries;
};

// A step takes 10 ms and `row` more for each further row, a draft of all sequences `draft`.
DraftPolicy policy_of(double row, double draft) {
  DraftPolicy policy;
  for (const int64_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 64}) {
    policy.record_step(rows, 0.010 + row * static_cast<double>(rows - 1));
  }
  for (const int64_t sequences : {1, 2, 8, 16}) policy.record_drafting(sequences, draft);
  return policy;
}

TEST(DraftPolicy, DraftsAsMuchAsPays) {
  const DraftPolicy cheap = policy_of(0.0005, 0.001), dear = policy_of(0.005, 0.0025);
  EXPECT_EQ(Decoding({0.98}).chosen_by(cheap), (std::vector<int64_t>{3}));
  EXPECT_EQ(Decoding({0.50}).chosen_by(cheap), (std::vector<int64_t>{2}));
  EXPECT_EQ(Decoding({0.05}).chosen_by(cheap), (std::vector<int64_t>{0}));
  EXPECT_EQ(Decoding({0.50}).chosen_by(dear), (std::vector<int64_t>{0}));
  // Rows that cost as much as a step of their own never pay.
  EXPECT_EQ(Decoding({1.0}).chosen_by(policy_of(0.010, 0.002)), (std::vector<int64_t>{0}));
}

TEST(DraftPolicy, EachSequenceGetsItsOwn) {
  const DraftPolicy policy = policy_of(0.001, 0.001);
  EXPECT_EQ(Decoding({0.98, 0.02}).chosen_by(policy)[1], 0);
  EXPECT_GT(Decoding({0.98, 0.02}).chosen_by(policy)[0], 1);
  Decoding limited({0.98, 0.98});
  limited.entries[1].num_drafts = 1;
  EXPECT_EQ(limited.chosen_by(policy), (std::vector<int64_t>{3, 1}));
}

// A sequence that is never right stops after a few windows, and tries again much later.
TEST(DraftPolicy, AcceptanceFollowsTheWindows) {
  const DraftPolicy policy = policy_of(0.001, 0.002);
  Sequence sequence;
  const auto drafts = [&] {
    StepEntry entry{.sequence = &sequence, .num_tokens = 1, .num_drafts = 3, .samples = true};
    policy.choose({&entry, 1});
    return entry.num_drafts;
  };
  int64_t windows = 0, rest = 0;
  for (; drafts() > 0 && windows < 1000; ++windows) {
    DraftPolicy::record_window(sequence, drafts(), 0);
  }
  EXPECT_GT(windows, 2);
  EXPECT_LT(windows, 20);
  for (; drafts() == 0 && rest < 1000; ++rest) DraftPolicy::record_window(sequence, 0, 0);
  EXPECT_GT(rest, 5);
  EXPECT_LT(rest, 300);
  for (int i = 0; i < 50; ++i) DraftPolicy::record_window(sequence, 3, 3);
  EXPECT_EQ(drafts(), 3);
}

TEST(DraftPolicy, WhatComesAfterARejectedDraftSaysNothing) {
  Sequence once, often;
  DraftPolicy::record_window(once, 1, 0);
  DraftPolicy::record_window(often, 3, 0);
  EXPECT_EQ(once.draft_acceptance, often.draft_acceptance);
  EXPECT_LT(once.draft_acceptance, kFirstAcceptance);
}

TEST(RowTimes, EstimatesFromTheNearest) {
  RowTimes times;
  EXPECT_DOUBLE_EQ(times.at(1), 1);
  EXPECT_GT(times.at(1000), times.at(100));
  times.add(4, 0.010);
  times.add(4, 5.0);  // a machine that stalled
  EXPECT_LT(times.at(4), 0.012);
  EXPECT_GT(times.at(5), times.at(4));
  EXPECT_LT(times.at(1), times.at(4));
  // What was slow once is not taken for slow for ever.
  times.add(8, 1.0);
  EXPECT_GT(times.at(8), 0.9);
  for (int i = 0; i < 1000; ++i) times.add(4, 0.010);
  EXPECT_LT(times.at(8), 0.020);
  times.add(100'000'000, 1);
  times.add(2, 0);  // a clock that stands
  EXPECT_GT(times.at(2), 0);
}

}  // namespace
}  // namespace fathom
