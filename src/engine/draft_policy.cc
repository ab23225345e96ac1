#include "engine/draft_policy.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace fathom {
namespace {

// Where nothing was measured, time grows with the rows to this power, and drafting one token takes
// this share of a step.
constexpr double kPower = 0.5;
constexpr double kDraftingShare = 0.25;

// A new outcome's part of a sequence's share of right drafts, and of the share of all sequences.
constexpr double kNewOutcome = 0.125;
constexpr double kNewOutcomeOfAll = 1.0 / 64;
// How far each step without drafts takes a sequence's shares back to kFirstAcceptance, so that one
// whose text has changed tries again.
constexpr double kForgotten = 1.0 / 256;

// Drafts have to promise this much more than no drafts.
constexpr double kLeastGain = 1.02;

// One of so many steps tries another number of drafts, so that times follow the machine's load.
constexpr int64_t kTrialEvery = 64;

// The largest credit: enough for trials when a text changes. Also the most that one step's drafts
// are charged, so that a stall of the machine does not end drafting.
constexpr double kMostCredit = 8;

// Considering drafts costs the time in which the host prepares a step. It is done more and more
// rarely where nothing is drafted.
constexpr int64_t kLeastRest = 32, kMostRest = 256;

double mix(double average, double value, double share) {
  return average + share * (value - average);
}

}  // namespace

size_t RowTimes::index_of(int64_t rows) {
  const auto exact = static_cast<int64_t>(kExact);
  if (rows <= exact) return static_cast<size_t>(std::max<int64_t>(rows, 1) - 1);
  const double octaves = std::log2(static_cast<double>(rows) / static_cast<double>(exact));
  const auto index = kExact - 1 + static_cast<size_t>(std::lround(octaves * kOfAnOctave));
  return std::min(index, std::tuple_size_v<decltype(times_)> - 1);
}

double RowTimes::rows_of(size_t index) {
  if (index < kExact) return static_cast<double>(index + 1);
  return static_cast<double>(kExact) *
         std::exp2(static_cast<double>(index - kExact + 1) / kOfAnOctave);
}

// The lower one of two in the middle.
double RowTimes::Times::median() const {
  std::array<double, kKept> sorted = last;
  const auto end = sorted.begin() + std::min<int64_t>(count, kKept);
  const auto middle = sorted.begin() + (end - sorted.begin() - 1) / 2;
  std::nth_element(sorted.begin(), middle, end);
  return *middle;
}

void RowTimes::add(int64_t rows, double seconds) {
  if (seconds <= 0) return;  // a test's clock
  Times& times = times_[index_of(rows)];
  times.last[static_cast<size_t>(times.count++) % kKept] = seconds;
  ++num_measured_;
}

double RowTimes::at(int64_t rows) const {
  const size_t index = index_of(rows);
  for (size_t away = 0; away < times_.size(); ++away) {
    for (const size_t near : {index - away, index + away}) {  // wraps below 0, beyond the end
      if (near >= times_.size() || times_[near].count == 0) continue;
      return times_[near].median() * std::pow(rows_of(index) / rows_of(near), kPower);
    }
  }
  return std::pow(rows_of(index), kPower);
}

bool RowTimes::try_rows(int64_t rows) {
  Times& times = times_[index_of(rows)];
  if (times.count >= kEnough || times.attempts >= kEnough) return false;
  ++times.attempts;
  return true;
}

double DraftPolicy::acceptance(const Sequence& sequence, size_t position) const {
  const double own = sequence.draft_acceptance[position];
  return own < 0 ? acceptance_[position] : own;
}

void DraftPolicy::record_window(Sequence& sequence, int64_t drafts, int64_t accepted) {
  for (size_t i = 0; i < acceptance_.size(); ++i) {
    double& own = sequence.draft_acceptance[i];
    const auto position = static_cast<int64_t>(i);
    if (drafts == 0 && own >= 0) own = mix(own, kFirstAcceptance[i], kForgotten);
    if (position >= drafts || position > accepted) continue;  // nobody knows whether it was right
    const double outcome = position < accepted ? 1 : 0;
    own = mix(acceptance(sequence, i), outcome, kNewOutcome);
    acceptance_[i] = mix(acceptance_[i], outcome, kNewOutcomeOfAll);
  }
  // A step without drafts gives each sequence one token.
  if (drafts > 0) add_credit(static_cast<double>(accepted) / num_entries_);
}

void DraftPolicy::record_step(int64_t rows, double seconds) {
  correct_charge(seconds);
  steps_.add(rows, seconds);
  ++steps_since_trial_;
  add_credit(kMostLost);
}

void DraftPolicy::record_drafting(int64_t sequences, int64_t drafts, double seconds) {
  drafting_[static_cast<size_t>(drafts - 1)].add(sequences, seconds);
  drafting_seconds_ = seconds;
}

void DraftPolicy::add_credit(double steps) { credit_ = std::min(kMostCredit, credit_ + steps); }

int64_t DraftPolicy::rest() const {
  const auto until_credit = static_cast<int64_t>(std::ceil(-credit_ / kMostLost)) + 1;
  return std::clamp(std::max(rest_, until_credit), kLeastRest, kMostRest);
}

DraftPolicy::Prospect DraftPolicy::prospect(std::span<const StepEntry> entries,
                                            int64_t drafts) const {
  Prospect found;
  for (const StepEntry& entry : entries) {
    const int64_t own = std::min(drafts, entry.num_drafts);
    double reached = 1;  // the chance that the row's token is the sequence's
    found.tokens += reached;
    for (int64_t i = 0; i < own; ++i) {
      reached *= acceptance(*entry.sequence, static_cast<size_t>(i));
      found.tokens += reached;
    }
    found.rows += 1 + own;
    found.drafting += own > 0;
  }
  return found;
}

double DraftPolicy::seconds(const Prospect& prospect, int64_t drafts) const {
  const double step = steps_.at(prospect.rows);
  if (drafts == 0) return step;
  const RowTimes& times = drafting_[static_cast<size_t>(drafts - 1)];
  if (!times.is_empty()) return step + times.at(prospect.drafting);
  return step + kDraftingShare * static_cast<double>(drafts) * steps_.at(prospect.drafting);
}

int64_t DraftPolicy::trial(std::span<const StepEntry> entries, int64_t most) {
  for (int64_t drafts = 0; drafts <= most; ++drafts) {
    const Prospect found = prospect(entries, drafts);
    const bool is_new = steps_.try_rows(found.rows);
    const bool drafts_are_new =
        drafts > 0 && drafting_[static_cast<size_t>(drafts - 1)].try_rows(found.drafting);
    if (is_new || drafts_are_new) return drafts;
  }
  if (steps_since_trial_ < kTrialEvery) return -1;
  steps_since_trial_ = 0;
  return ++num_trials_ % (most + 1);
}

void DraftPolicy::choose(std::span<StepEntry> entries) {
  int64_t most = 0;
  for (const StepEntry& entry : entries) most = std::max(most, entry.num_drafts);
  if (most == 0) return;
  num_entries_ = static_cast<double>(entries.size());
  lower(entries, most);
  const bool drafts =
      std::ranges::any_of(entries, [](const StepEntry& entry) { return entry.num_drafts > 0; });
  rest_ = drafts ? 0 : std::clamp(2 * rest_, kLeastRest, kMostRest);
  if (drafts) charge(entries);
}

void DraftPolicy::charge(std::span<const StepEntry> entries) {
  int64_t most = 0;
  for (const StepEntry& entry : entries) most = std::max(most, entry.num_drafts);
  const double plain = steps_.at(std::ssize(entries));
  charged_ = seconds(prospect(entries, most), most) / plain - 1;
  drafting_seconds_ = 0;
  credit_ -= charged_;
}

void DraftPolicy::correct_charge(double step_seconds) {
  const double charged = std::exchange(charged_, 0);
  if (charged == 0 || step_seconds <= 0 || drafting_seconds_ <= 0) return;
  const double plain = steps_.at(static_cast<int64_t>(num_entries_));
  const double cost = (drafting_seconds_ + step_seconds) / plain - 1;
  add_credit(charged - std::min(cost, kMostCredit));
}

void DraftPolicy::lower(std::span<StepEntry> entries, int64_t most) {
  int64_t best = credit_ > 0 ? trial(entries, most) : 0;
  if (best < 0) {
    best = 0;
    double best_rate = 0;
    for (int64_t drafts = 0; drafts <= most; ++drafts) {
      const Prospect found = prospect(entries, drafts);
      const double rate = found.tokens / seconds(found, drafts);
      if (rate <= best_rate) continue;
      best_rate = drafts == 0 ? kLeastGain * rate : rate;
      best = drafts;
    }
    if (best > 0 && entries.size() > 1) return drop_poor_drafts(entries, best);
  }
  for (StepEntry& entry : entries) entry.num_drafts = std::min(best, entry.num_drafts);
}

// Each sequence gets those of the drafts that are worth the rows they take.
void DraftPolicy::drop_poor_drafts(std::span<StepEntry> entries, int64_t drafts) const {
  const Prospect found = prospect(entries, drafts);
  const auto count = std::ssize(entries);
  const double a_row = (steps_.at(found.rows) - steps_.at(count)) /
                       static_cast<double>(std::max<int64_t>(1, found.rows - count));
  const double worth = a_row * found.tokens / seconds(found, drafts);
  for (StepEntry& entry : entries) {
    const int64_t most = std::min(drafts, entry.num_drafts);
    entry.num_drafts = 0;
    double reached = 1;
    for (int64_t i = 0; i < most; ++i) {
      reached *= acceptance(*entry.sequence, static_cast<size_t>(i));
      if (reached <= worth) break;
      ++entry.num_drafts;
    }
  }
}

}  // namespace fathom
