#include "engine/draft_policy.h"

#include <gtest/gtest.h>

#include <vector>

namespace fathom {
namespace {

using Shares = std::array<double, kMaxDrafts>;

// Sequences that decode, each with up to 3 drafts.
struct Decoding {
  explicit Decoding(const std::vector<Shares>& acceptances) : sequences(acceptances.size()) {
    for (size_t i = 0; i < sequences.size(); ++i) {
      sequences[i].draft_acceptance = acceptances[i];
      entries.push_back(
          {.sequence = &sequences[i], .num_tokens = 1, .num_drafts = 3, .samples = true});
    }
  }
  std::vector<int64_t> chosen_by(DraftPolicy& policy) {
    policy.choose(entries);
    std::vector<int64_t> drafts;
    for (const StepEntry& entry : entries) drafts.push_back(entry.num_drafts);
    return drafts;
  }
  std::vector<Sequence> sequences;
  std::vector<StepEntry> entries;
};

Shares all(double share) { return {share, share, share}; }

// A step takes 10 ms and `row` more for each further row, a draft of all sequences `draft`.
DraftPolicy policy_of(double row, double draft) {
  DraftPolicy policy;
  for (int i = 0; i < RowTimes::kEnough; ++i) {
    for (const int64_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 64}) {
      policy.record_step(rows, 0.010 + row * static_cast<double>(rows - 1));
    }
    for (const int64_t sequences : {1, 2, 8, 16}) {
      for (int64_t drafts = 1; drafts <= kMaxDrafts; ++drafts) {
        policy.record_drafting(sequences, drafts, draft * static_cast<double>(drafts));
      }
    }
  }
  return policy;
}

TEST(DraftPolicy, DraftsAsMuchAsPays) {
  DraftPolicy cheap = policy_of(0.0005, 0.001), dear = policy_of(0.005, 0.0025);
  EXPECT_EQ(Decoding({all(0.98)}).chosen_by(cheap), (std::vector<int64_t>{3}));
  EXPECT_EQ(Decoding({all(0.50)}).chosen_by(cheap), (std::vector<int64_t>{2}));
  EXPECT_EQ(Decoding({all(0.05)}).chosen_by(cheap), (std::vector<int64_t>{0}));
  EXPECT_EQ(Decoding({all(0.50)}).chosen_by(dear), (std::vector<int64_t>{0}));
  // Rows that cost as much as a step of their own never pay.
  DraftPolicy useless = policy_of(0.010, 0.002);
  EXPECT_EQ(Decoding({all(1)}).chosen_by(useless), (std::vector<int64_t>{0}));
}

// First drafts that are always right and later ones that never are.
TEST(DraftPolicy, EachPositionHasItsOwnShare) {
  DraftPolicy policy = policy_of(0.0005, 0.001);
  EXPECT_EQ(Decoding({{1, 0.1, 1}}).chosen_by(policy), (std::vector<int64_t>{1}));
  Sequence sequence;
  for (int i = 0; i < 50; ++i) policy.record_window(sequence, 3, 1);
  EXPECT_GT(sequence.draft_acceptance[0], 0.99);
  EXPECT_LT(sequence.draft_acceptance[1], 0.01);
  EXPECT_LT(sequence.draft_acceptance[2], 0) << "behind a wrong draft nothing is known";
}

TEST(DraftPolicy, EachSequenceGetsItsOwn) {
  DraftPolicy policy = policy_of(0.001, 0.001);
  const std::vector<Shares> shares = {all(0.98), all(0.02)};
  EXPECT_EQ(Decoding(shares).chosen_by(policy)[1], 0);
  EXPECT_GT(Decoding(shares).chosen_by(policy)[0], 1);
  Decoding limited({all(0.98), all(0.98)});
  limited.entries[1].num_drafts = 1;
  EXPECT_EQ(limited.chosen_by(policy), (std::vector<int64_t>{3, 1}));
}

// A sequence that is never right stops after a few windows, and tries again much later.
TEST(DraftPolicy, AcceptanceFollowsTheWindows) {
  Sequence sequence;
  // With another policy each time: none of its choices is a trial.
  const auto drafts = [&] {
    DraftPolicy policy = policy_of(0.001, 0.002);
    StepEntry entry{.sequence = &sequence, .num_tokens = 1, .num_drafts = 3, .samples = true};
    policy.choose({&entry, 1});
    return entry.num_drafts;
  };
  DraftPolicy policy;
  int64_t windows = 0, rest = 0;
  for (; drafts() > 0 && windows < 1000; ++windows) policy.record_window(sequence, drafts(), 0);
  EXPECT_GT(windows, 2);
  EXPECT_LT(windows, 20);
  for (; drafts() == 0 && rest < 1000; ++rest) policy.record_window(sequence, 0, 0);
  EXPECT_GT(rest, 5);
  EXPECT_LT(rest, 300);
  for (int i = 0; i < 50; ++i) policy.record_window(sequence, 3, 3);
  EXPECT_EQ(drafts(), 3);
}

// What is learnt of some sequences is where the next one begins.
TEST(DraftPolicy, ANewSequenceIsLikeTheOthers) {
  DraftPolicy policy = policy_of(0.0005, 0.001);
  EXPECT_GT(Decoding({all(-1)}).chosen_by(policy)[0], 1);
  for (int i = 0; i < 300; ++i) {
    Sequence sequence;
    policy.record_window(sequence, 3, 1);
  }
  EXPECT_EQ(Decoding({all(-1)}).chosen_by(policy), (std::vector<int64_t>{1}));
}

TEST(DraftPolicy, WhatComesAfterARejectedDraftSaysNothing) {
  DraftPolicy one, other;
  Sequence once, often;
  one.record_window(once, 1, 0);
  other.record_window(often, 3, 0);
  EXPECT_EQ(once.draft_acceptance[0], often.draft_acceptance[0]);
  EXPECT_LT(once.draft_acceptance[0], kFirstAcceptance[0]);
  EXPECT_LT(often.draft_acceptance[1], 0);
}

// Every number of drafts is tried before any is chosen, and now and then later, so that a bad first
// time or another load of the machine does not decide for ever.
TEST(DraftPolicy, TriesWhatItDoesNotKnow) {
  DraftPolicy policy;
  std::array<int, kMaxDrafts + 1> first{}, later{};
  const auto choose = [&] { return Decoding({all(0.9)}).chosen_by(policy)[0]; };
  const auto run = [&](double row, double draft) {
    const int64_t drafts = choose();
    policy.record_step(1 + drafts, 0.010 + row * static_cast<double>(drafts));
    if (drafts > 0) policy.record_drafting(1, drafts, draft * static_cast<double>(drafts));
    return static_cast<size_t>(drafts);
  };
  for (int i = 0; i < 4 * RowTimes::kEnough; ++i) ++first[run(0.02, 0.02)];
  for (const int count : first) EXPECT_EQ(count, RowTimes::kEnough);
  for (int i = 0; i < 1000; ++i) ++later[run(0.02, 0.02)];
  EXPECT_GT(later[0], 980) << "drafts do not pay";
  for (const int count : later) EXPECT_GT(count, 2);
  // The machine has got faster.
  std::array<int, kMaxDrafts + 1> last{};
  for (int i = 0; i < 2000; ++i) run(0.0001, 0.0001);
  for (int i = 0; i < 200; ++i) ++last[run(0.0001, 0.0001)];
  EXPECT_GT(last[3], 180);
}

// Attempts whose steps had other rows, for lack of room, are not repeated for ever.
TEST(DraftPolicy, AttemptsWithoutATimeEnd) {
  DraftPolicy policy;
  for (int i = 0; i < 4 * RowTimes::kEnough; ++i) {
    Decoding({all(0)}).chosen_by(policy);
    policy.record_step(1, 0.010);
  }
  int64_t drafted = 0;
  for (int i = 0; i < 100; ++i) drafted += Decoding({all(0)}).chosen_by(policy)[0] > 0;
  EXPECT_LT(drafted, 5);
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
  // A cold first time is outvoted.
  for (const double seconds : {1.0, 0.020, 0.020}) times.add(8, seconds);
  EXPECT_LT(times.at(8), 0.021);
  times.add(100'000'000, 1);
  times.add(2, 0);  // a clock that stands
  EXPECT_GT(times.at(2), 0);
}

}  // namespace
}  // namespace fathom
