#include "engine/draft_policy.h"

#include <algorithm>
#include <cmath>

namespace fathom {
namespace {

// Of a new measurement in the average. A measurement counts as at most twice the average: a machine
// that stalls says nothing about rows.
constexpr double kNewTime = 0.125;
constexpr double kMostOfAverage = 2;
// How far each measurement takes the averages of other numbers of rows.
constexpr double kDrift = 1.0 / 128;
// Where nothing was measured, time grows with the rows to this power, and drafting one token takes
// this share of a step.
constexpr double kPower = 0.5;
constexpr double kDraftingShare = 0.25;

// A sequence's share of accepted drafts: a new outcome's part of it, and how far each step without
// drafts takes it back to kFirstAcceptance, so that a sequence whose text has changed tries again.
constexpr double kNewOutcome = 0.125;
constexpr double kForgotten = 1.0 / 256;

// Drafts have to promise this much more than no drafts.
constexpr double kLeastGain = 1.02;

double mix(double average, double value, double share) {
  return average + share * (value - average);
}

}  // namespace

size_t RowTimes::index_of(int64_t rows) {
  const auto exact = static_cast<int64_t>(kExact);
  if (rows <= exact) return static_cast<size_t>(std::max<int64_t>(rows, 1) - 1);
  const double octaves = std::log2(static_cast<double>(rows) / static_cast<double>(exact));
  const auto index = kExact - 1 + static_cast<size_t>(std::lround(octaves * kOfAnOctave));
  return std::min(index, std::tuple_size_v<decltype(seconds_)> - 1);
}

double RowTimes::rows_of(size_t index) {
  if (index < kExact) return static_cast<double>(index + 1);
  return static_cast<double>(kExact) *
         std::exp2(static_cast<double>(index - kExact + 1) / kOfAnOctave);
}

void RowTimes::add(int64_t rows, double seconds) {
  if (seconds <= 0) return;  // a test's clock
  const size_t index = index_of(rows);
  double& average = seconds_[index];
  average =
      average == 0 ? seconds : mix(average, std::min(seconds, kMostOfAverage * average), kNewTime);
  for (size_t other = 0; other < seconds_.size(); ++other) {
    if (other == index || seconds_[other] == 0) continue;
    const double estimate = average * std::pow(rows_of(other) / rows_of(index), kPower);
    seconds_[other] = mix(seconds_[other], estimate, kDrift);
  }
}

double RowTimes::at(int64_t rows) const {
  const size_t index = index_of(rows);
  for (size_t away = 0; away < seconds_.size(); ++away) {
    for (const size_t near : {index - away, index + away}) {  // wraps below 0, beyond the end
      if (near >= seconds_.size() || seconds_[near] == 0) continue;
      return seconds_[near] * std::pow(rows_of(index) / rows_of(near), kPower);
    }
  }
  return std::pow(rows_of(index), kPower);
}

void DraftPolicy::record_window(Sequence& sequence, int64_t drafts, int64_t accepted) {
  double& acceptance = sequence.draft_acceptance;
  if (drafts == 0) acceptance = mix(acceptance, kFirstAcceptance, kForgotten);
  for (int64_t i = 0; i < std::min(accepted + 1, drafts); ++i) {
    acceptance = mix(acceptance, i < accepted ? 1 : 0, kNewOutcome);
  }
}

void DraftPolicy::choose(std::span<StepEntry> entries) const {
  int64_t most = 0;
  for (const StepEntry& entry : entries) most = std::max(most, entry.num_drafts);
  if (most == 0) return;
  const auto count = std::ssize(entries);
  const double plain = steps_.at(count);
  const bool is_measured = drafting_.at(1) != 1;
  double best_rate = kLeastGain * static_cast<double>(count) / plain;
  int64_t best = 0;
  for (int64_t drafts = 1; drafts <= most; ++drafts) {
    int64_t rows = 0, drafting = 0;
    double tokens = 0;
    for (const StepEntry& entry : entries) {
      const int64_t own = std::min(drafts, entry.num_drafts);
      double reached = 1;  // the chance that the row's token is the sequence's
      for (int64_t i = 0; i <= own; ++i, reached *= entry.sequence->draft_acceptance) {
        tokens += reached;
      }
      rows += 1 + own;
      drafting += own > 0;
    }
    const double share = is_measured ? drafting_.at(drafting) : kDraftingShare * plain;
    const double rate = tokens / (steps_.at(rows) + static_cast<double>(drafts) * share);
    if (rate <= best_rate) continue;
    best_rate = rate;
    best = drafts;
  }
  // Of those, a sequence gets the drafts that are worth the rows they take.
  const double row = (steps_.at(count + 1) - plain) * best_rate;
  for (StepEntry& entry : entries) {
    int64_t own = 0;
    double reached = entry.sequence->draft_acceptance;
    for (; own < std::min(best, entry.num_drafts) && reached > row; ++own) {
      reached *= entry.sequence->draft_acceptance;
    }
    entry.num_drafts = own;
  }
}

}  // namespace fathom
