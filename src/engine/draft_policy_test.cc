#include "engine/draft_policy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
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
    const auto seconds = [&](int64_t rows) { return 0.010 + row * static_cast<double>(rows - 1); };
    for (const int64_t sequences : {1, 2, 16}) {
      policy.record_step(sequences, sequences, seconds(sequences));
    }
    for (const int64_t rows : {2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 64}) {
      policy.record_step(1, rows, seconds(rows));
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

// Before much is known an outcome says more.
TEST(DraftPolicy, TheFirstOutcomesSayMost) {
  DraftPolicy policy = policy_of(0.001, 0.002);
  for (int i = 0; i < 24; ++i) {
    Sequence sequence;
    policy.record_window(sequence, 1, 0);
  }
  EXPECT_EQ(Decoding({all(-1)}).chosen_by(policy), (std::vector<int64_t>{0}));
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

// A machine on which a step of one row takes 10 ms, and sequences whose drafts are right with a
// probability.
struct Machine {
  double row = 0.001, draft = 0.001;  // seconds of a further row; of a draft of all sequences
  std::mt19937 random{1};

  struct Step {
    double seconds = 0, tokens = 0;
    int64_t most_drafts = 0;
  };
  Step step(DraftPolicy& policy, std::vector<Sequence>& sequences, double acceptance) {
    std::vector<StepEntry> entries;
    entries.reserve(sequences.size());
    for (Sequence& sequence : sequences) {
      entries.push_back({.sequence = &sequence, .num_tokens = 1, .num_drafts = 3, .samples = true});
    }
    policy.choose(entries);
    Step step;
    int64_t rows = 0, drafting = 0;
    for (const StepEntry& entry : entries) {
      rows += 1 + entry.num_drafts;
      drafting += entry.num_drafts > 0;
      step.most_drafts = std::max(step.most_drafts, entry.num_drafts);
    }
    const double drafting_s = draft * static_cast<double>(step.most_drafts);
    const double step_s = 0.010 + row * static_cast<double>(rows - 1);
    if (step.most_drafts > 0) policy.record_drafting(drafting, step.most_drafts, drafting_s);
    policy.record_step(std::ssize(sequences), rows, step_s);
    step.seconds = drafting_s + step_s;
    for (const StepEntry& entry : entries) {
      int64_t right = 0;
      const auto is_right = [&] { return std::bernoulli_distribution(acceptance)(random); };
      while (right < entry.num_drafts && is_right()) ++right;
      policy.record_window(*entry.sequence, entry.num_drafts, right);
      step.tokens += 1 + static_cast<double>(right);
    }
    return step;
  }
  // Tokens a second with exactly so many drafts.
  double rate(double count, int64_t drafts, double acceptance) const {
    double tokens = 1, reached = 1;
    for (int64_t i = 0; i < drafts; ++i) tokens += reached *= acceptance;
    const auto k = static_cast<double>(drafts);
    return count * tokens / (0.010 + row * (count * (1 + k) - 1) + draft * k);
  }
};

// Whatever rows and drafts cost and however often they are right, no more time is lost than
// kMostLost and the first credit, and what overshoots it by one step's drafts; and where drafts
// pay, most of what the best number of drafts gains is gained.
TEST(DraftPolicy, LosesNoMoreThanItsShare) {
  constexpr int kSteps = 4000;
  for (const size_t count : {1, 4, 16}) {
    for (const double row : {0.0, 0.0002, 0.001, 0.004, 0.010}) {
      for (const double draft : {0.0002, 0.001, 0.004}) {
        for (const double acceptance : {0.0, 0.3, 0.6, 0.8, 0.95}) {
          Machine machine{.row = row, .draft = draft};
          DraftPolicy policy;
          std::vector<Sequence> sequences(count);
          double seconds = 0, tokens = 0;
          for (int i = 0; i < kSteps; ++i) {
            const Machine::Step step = machine.step(policy, sequences, acceptance);
            seconds += step.seconds;
            tokens += step.tokens;
          }
          const auto batch = static_cast<double>(count);
          const double plain = machine.rate(batch, 0, acceptance);
          const double lost = seconds * plain / batch - tokens / batch;  // steps
          const double overshoot = 3 * (batch * row + draft) / 0.010;
          EXPECT_LE(lost, DraftPolicy::kMostLost * kSteps + DraftPolicy::kFirstCredit +
                              std::min(overshoot, 8.0))
              << count << " sequences, row " << row << ", draft " << draft << ", acceptance "
              << acceptance;
          double best = plain;
          for (int64_t k = 1; k <= kMaxDrafts; ++k) {
            best = std::max(best, machine.rate(batch, k, acceptance));
          }
          EXPECT_GE(tokens / seconds, best - 0.3 * (best - plain) - 0.03 * plain)
              << count << " sequences, row " << row << ", draft " << draft << ", acceptance "
              << acceptance;
        }
      }
    }
  }
}

// Sequences whose rows cost nearly as much as steps of their own, in runs as short as a batch's:
// few of many try drafts, and what they show is believed of all.
TEST(DraftPolicy, ManySequencesTryLittle) {
  constexpr int kSteps = 40;
  for (const size_t count : {32, 64, 128}) {
    Machine machine{.row = 0.006, .draft = 0.002};
    DraftPolicy policy;
    std::vector<Sequence> sequences(count);
    double seconds = 0, tokens = 0;
    for (int i = 0; i < kSteps; ++i) {
      const Machine::Step step = machine.step(policy, sequences, 0.5);
      seconds += step.seconds;
      tokens += step.tokens;
    }
    const auto batch = static_cast<double>(count);
    const double lost = seconds * machine.rate(batch, 0, 0) / batch - tokens / batch;  // steps
    EXPECT_GT(lost, 0) << "nothing was tried";
    EXPECT_LT(lost, 0.35) << count << " sequences";
  }
}

// Times of fewer sequences tell that twice the rows take twice as long. So nothing is tried.
TEST(DraftPolicy, TriesNothingThatTimesOfOthersRuleOut) {
  Machine machine{.row = 0.010, .draft = 0.002};
  DraftPolicy policy;
  for (const size_t count : {1, 2, 4, 8, 16, 32, 64}) {
    for (int i = 0; i < RowTimes::kEnough; ++i) {
      policy.record_step(static_cast<int64_t>(count), static_cast<int64_t>(count),
                         0.010 * static_cast<double>(count));
    }
  }
  std::vector<Sequence> sequences(48);
  for (int i = 0; i < 40; ++i) EXPECT_EQ(machine.step(policy, sequences, 1).most_drafts, 0);
}

// Two rows of one sequence cost less than two sequences, whose caches are two.
TEST(DraftPolicy, RowsOfOneSequenceHaveTheirOwnTimes) {
  DraftPolicy policy;
  for (int i = 0; i < RowTimes::kEnough; ++i) {
    policy.record_step(1, 1, 0.010);
    policy.record_step(1, 2, 0.012);
    policy.record_step(2, 2, 0.030);
    policy.record_step(2, 4, 0.032);
    policy.record_drafting(1, 1, 0.002);
    policy.record_drafting(2, 1, 0.002);
  }
  Decoding one({all(0.9)}), two({all(0.9), all(0.9)});
  for (StepEntry& entry : one.entries) entry.num_drafts = 1;
  for (StepEntry& entry : two.entries) entry.num_drafts = 1;
  EXPECT_EQ(one.chosen_by(policy), (std::vector<int64_t>{1}));
  EXPECT_EQ(two.chosen_by(policy), (std::vector<int64_t>{1, 1}));
}

// Every number of drafts is tried now and then, so that a bad first time or another load of the
// machine does not decide for ever.
TEST(DraftPolicy, TriesWhatItDoesNotKnow) {
  DraftPolicy policy;
  std::vector<Sequence> sequences(1);
  Machine machine{.row = 0.006, .draft = 0.004};
  std::array<int, kMaxDrafts + 1> chosen{}, last{};
  const auto run = [&](int steps, std::array<int, kMaxDrafts + 1>& counts) {
    for (int i = 0; i < steps; ++i) {
      ++counts[static_cast<size_t>(machine.step(policy, sequences, 0.9).most_drafts)];
    }
  };
  run(10000, chosen);
  for (const int count : chosen) EXPECT_GE(count, RowTimes::kEnough);
  EXPECT_GT(chosen[0], 9800) << "drafts do not pay";
  // The machine has got faster.
  machine.row = machine.draft = 0.0001;
  run(5000, last);
  last = {};
  run(200, last);
  EXPECT_GT(last[3], 180);
}

// Without drafts the next ones are considered more and more rarely, soonest when there is credit.
TEST(DraftPolicy, RestsWhereDraftsDoNotPay) {
  DraftPolicy policy = policy_of(0.010, 0.002);
  std::vector<int64_t> rests;
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(Decoding({all(0.5)}).chosen_by(policy)[0], 0);
    rests.push_back(policy.rest());
  }
  EXPECT_EQ(rests, (std::vector<int64_t>{32, 64, 128, 256, 256}));
  DraftPolicy cheap = policy_of(0.0005, 0.001);
  EXPECT_GT(Decoding({all(0.98)}).chosen_by(cheap)[0], 0);
  for (int i = 0; i < 100; ++i) Decoding({all(0.98)}).chosen_by(cheap);  // none is right
  EXPECT_EQ(Decoding({all(0.98)}).chosen_by(cheap)[0], 0) << "there is no credit";
  EXPECT_GT(cheap.rest(), 32) << "until there is some";
}

// Steps whose times are never measured, as prompts come with all of them, keep no draft away.
TEST(DraftPolicy, AttemptsWithoutATimeEnd) {
  DraftPolicy policy;
  int64_t drafts = 0;
  for (int i = 0; i < 4 * RowTimes::kEnough; ++i) {
    drafts += Decoding({all(0.98)}).chosen_by(policy)[0];
    if (i == RowTimes::kEnough - 1) {
      EXPECT_EQ(drafts, 0) << "a time without drafts may still come";
    }
  }
  EXPECT_GT(drafts, 0);
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
  RowTimes linear;
  for (const int64_t rows : {32, 64, 128}) linear.add(rows, 0.001 * static_cast<double>(rows));
  EXPECT_NEAR(linear.at(256), 0.256, 0.02);
  EXPECT_NEAR(linear.at(90), 0.090, 0.005);
  times.add(2, 0);  // a clock that stands
  EXPECT_GT(times.at(2), 0);
}

}  // namespace
}  // namespace fathom
