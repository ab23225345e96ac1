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

// What is measured half an octave of rows away counts half, and what is measured of related steps a
// quarter. kPower counts as much as measurements a tenth of an octave around their mean.
constexpr double kFade = 2, kOfRelated = 0.25, kPowersPart = 0.01;

// Times near by, fading like that, that make another number of rows known.
constexpr double kEnoughNear = 2;

// A new outcome's part of a sequence's share of right drafts. The share of all sequences begins as
// if it had seen kAssumed outcomes, and a new one's part is kNewOutcomeOfAll at least.
constexpr double kNewOutcome = 0.125;
constexpr double kAssumed = 8, kNewOutcomeOfAll = 1.0 / 64;
// How far each step without drafts takes a sequence's shares back to kFirstAcceptance, so that one
// whose text has changed tries again.
constexpr double kForgotten = 1.0 / 256;

// Drafts have to promise this much more than no drafts.
constexpr double kLeastGain = 1.02;

// A number of drafts whose time is not known is tried if this much more than its estimate would
// make it the best.
constexpr double kHope = 1.05;

// One of so many steps tries another number of drafts, so that times follow the machine's load,
// unless it seems to give less than this share of the tokens a second without drafts.
constexpr int64_t kTrialEvery = 64;
constexpr double kWorthTrying = 0.6;

// A trial with kMany sequences or more lets only 1/kPartOfMany of them draft, until the time of
// such a step is known.
constexpr int64_t kMany = 8, kPartOfMany = 4;

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

double RowTimes::log_rows_of(size_t index) {
  if (index < kExact) return std::log2(static_cast<double>(index + 1));
  return std::log2(static_cast<double>(kExact)) +
         static_cast<double>(index - kExact + 1) / kOfAnOctave;
}

// The lower one of two in the middle.
double RowTimes::Times::find_median() const {
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
  times.median = times.find_median();
  times.log_median = std::log2(times.median);
  ++num_measured_;
}

void RowTimes::Fit::add(double log_rows, double log_seconds, double its_weight) {
  const double away = log_rows - centre;
  its_weight *= std::exp2(-kFade * std::abs(away));
  weight += its_weight;
  x += its_weight * away;
  y += its_weight * log_seconds;
  xx += its_weight * away * away;
  xy += its_weight * away * log_seconds;
}

double RowTimes::Fit::seconds() const {
  const double mean = x / weight, log_mean = y / weight;
  const double variance = xx / weight - mean * mean;
  const double covariance = xy / weight - mean * log_mean;
  const double power = (covariance + kPowersPart * kPower) / (variance + kPowersPart);
  return std::exp2(log_mean - std::clamp(power, 0.0, 1.0) * mean);
}

void RowTimes::add_to(Fit& fit, double share) const {
  for (size_t i = 0; i < times_.size(); ++i) {
    if (times_[i].count == 0) continue;
    const auto count = static_cast<double>(std::min<int64_t>(times_[i].count, kEnough));
    fit.add(log_rows_of(i), times_[i].log_median, share * count);
  }
}

double RowTimes::at(int64_t rows, const RowTimes* related) const {
  const size_t index = index_of(rows);
  if (times_[index].count >= kEnough) return times_[index].median;
  Fit fit{.centre = log_rows_of(index)};
  add_to(fit, 1);
  if (related != nullptr) related->add_to(fit, kOfRelated);
  return fit.weight > 0 ? fit.seconds() : std::exp2(kPower * fit.centre);
}

bool RowTimes::is_known(int64_t rows) const {
  const Times& times = times_[index_of(rows)];
  if (times.count >= kEnough || times.attempts >= kEnough) return true;
  Fit near{.centre = log_rows_of(index_of(rows))};
  add_to(near, 1);
  return near.weight >= kEnoughNear;
}

void RowTimes::note_attempt(int64_t rows) { ++times_[index_of(rows)].attempts; }

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
    const double part = 1 / (kAssumed + static_cast<double>(++num_outcomes_[i]));
    acceptance_[i] = mix(acceptance_[i], outcome, std::max(part, kNewOutcomeOfAll));
  }
  // A step without drafts gives each sequence one token.
  if (drafts > 0) add_credit(static_cast<double>(accepted) / num_entries_);
}

void DraftPolicy::record_step(int64_t sequences, int64_t rows, double seconds) {
  correct_charge(seconds);
  (rows > sequences ? drafted_ : plain_).add(rows, seconds);
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
  if (drafts == 0) return plain_.at(prospect.rows, &drafted_);
  return drafted_.at(prospect.rows, &plain_) + drafting_seconds(prospect.drafting, drafts);
}

// Drafts of which no time was measured take as long each as those of a number that was.
double DraftPolicy::drafting_seconds(int64_t sequences, int64_t drafts) const {
  const auto number = static_cast<double>(drafts);
  if (const RowTimes& own = drafting_[static_cast<size_t>(drafts - 1)]; !own.is_empty()) {
    return own.at(sequences);
  }
  for (size_t i = 0; i < drafting_.size(); ++i) {
    if (drafting_[i].is_empty()) continue;
    return drafting_[i].at(sequences) * number / static_cast<double>(i + 1);
  }
  return kDraftingShare * number * plain_.at(sequences, &drafted_);
}

double DraftPolicy::rate(std::span<const StepEntry> entries, int64_t drafts) const {
  const Prospect found = prospect(entries, drafts);
  return found.tokens / seconds(found, drafts);
}

// By few if there are many and the time of their rows is not known yet.
DraftPolicy::Choice DraftPolicy::trial(std::span<const StepEntry> entries, int64_t drafts) const {
  const auto count = std::ssize(entries);
  const int64_t few = count / kPartOfMany;
  if (count < kMany || drafts == 0) return {drafts, true, count};
  const Prospect part = prospect(entries.first(static_cast<size_t>(few)), drafts);
  return {drafts, true, drafted_.is_known(part.rows + count - few) ? count : few};
}

DraftPolicy::Choice DraftPolicy::best(std::span<const StepEntry> entries, int64_t most) const {
  const auto count = std::ssize(entries);
  if (!plain_.is_known(count)) return {0, true, count};
  Choice best{0, false, count};
  double best_rate = kLeastGain * rate(entries, 0);
  for (int64_t drafts = 1; drafts <= most; ++drafts) {
    const bool is_known = drafted_.is_known(prospect(entries, drafts).rows);
    // The fewest drafts that might pay are tried first: their times say most about others'.
    if (!is_known && (credit_ <= kKeptCredit || best.is_trial)) continue;
    const Choice choice = is_known ? Choice{drafts, false, count} : trial(entries, drafts);
    const double rate = this->rate(entries, drafts) * (is_known ? 1 : kHope);
    if (rate <= best_rate) continue;
    best = choice;
    best_rate = rate;
  }
  return best;
}

DraftPolicy::Choice DraftPolicy::another(std::span<const StepEntry> entries, int64_t most,
                                         const Choice& best) {
  if (best.is_trial || steps_since_trial_ < kTrialEvery || credit_ <= kKeptCredit) return best;
  steps_since_trial_ = 0;
  const int64_t drafts = ++num_trials_ % (most + 1);
  const bool is_worth_it = rate(entries, drafts) > kWorthTrying * rate(entries, 0);
  return is_worth_it ? trial(entries, drafts) : best;
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
  const double plain = plain_.at(std::ssize(entries), &drafted_);
  charged_ = seconds(prospect(entries, most), most) / plain - 1;
  drafting_seconds_ = 0;
  credit_ -= charged_;
}

void DraftPolicy::correct_charge(double step_seconds) {
  const double charged = std::exchange(charged_, 0);
  if (charged == 0 || step_seconds <= 0 || drafting_seconds_ <= 0) return;
  const double plain = plain_.at(static_cast<int64_t>(num_entries_), &drafted_);
  const double cost = (drafting_seconds_ + step_seconds) / plain - 1;
  add_credit(charged - std::min(cost, kMostCredit));
}

void DraftPolicy::lower(std::span<StepEntry> entries, int64_t most) {
  Choice choice{0, false, std::ssize(entries)};
  if (credit_ > 0) choice = another(entries, most, best(entries, most));
  if (!choice.is_trial && choice.drafts > 0 && entries.size() > 1) {
    return drop_poor_drafts(entries, choice.drafts);
  }
  int64_t left = choice.entries, rows = 0;
  for (StepEntry& entry : entries) {
    entry.num_drafts = left-- > 0 ? std::min(choice.drafts, entry.num_drafts) : 0;
    rows += 1 + entry.num_drafts;
  }
  if (choice.is_trial) (choice.drafts == 0 ? plain_ : drafted_).note_attempt(rows);
}

// Each sequence gets those of the drafts that are worth the rows they take.
void DraftPolicy::drop_poor_drafts(std::span<StepEntry> entries, int64_t drafts) const {
  const Prospect found = prospect(entries, drafts);
  const auto count = std::ssize(entries);
  const double a_row = (drafted_.at(found.rows, &plain_) - plain_.at(count, &drafted_)) /
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
