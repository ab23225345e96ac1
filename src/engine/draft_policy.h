// How many drafts each sequence of a step gets: as many as give the most tokens a second, by the
// shares of drafts that were right so far and the measured times of steps and of drafting. None
// where drafting does not pay.
//
// A credit, counted in steps without drafts, bounds the time that drafts may waste. Each step adds
// a little; drafts cost the time that they take; accepted drafts add the steps that they save.
// Without credit nothing is drafted.
//
// It only affects speed. Engine thread only.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "engine/step_plan.h"

namespace fathom {

// Seconds by number of rows: the median of the last measurements, so that a machine that stalls and
// a first time with cold caches say nothing. Where too little was measured it estimates from the
// numbers of rows around.
class RowTimes {
 public:
  // Measurements, or attempts to get one, after which a time is believed.
  static constexpr int kEnough = 3;

  void add(int64_t rows, double seconds);
  // Relative to a step of one row before anything was measured. `related` times help to estimate.
  double at(int64_t rows, const RowTimes* related = nullptr) const;
  bool is_empty() const { return num_measured_ == 0; }

  // Whether enough was measured of so many rows or of nearly so many, or tried in vain.
  bool is_known(int64_t rows) const;
  // Counts an attempt to measure.
  void note_attempt(int64_t rows);

 private:
  static constexpr size_t kExact = 16;      // numbers of rows with an entry of their own
  static constexpr size_t kOfAnOctave = 4;  // beyond them
  static constexpr size_t kKept = 7;
  static size_t index_of(int64_t rows);
  static double log_rows_of(size_t index);  // base 2

  struct Times {
    std::array<double, kKept> last{};
    int64_t count = 0;  // of all that were added
    int attempts = 0;
    double median = 0, log_median = 0;  // base 2
    double find_median() const;
  };
  // A line through logarithms, which counts what is near more than what is far.
  struct Fit {
    double centre = 0;  // where it is asked
    double weight = 0, x = 0, y = 0, xx = 0, xy = 0;
    void add(double log_rows, double log_seconds, double its_weight);
    double seconds() const;
  };
  void add_to(Fit& fit, double share) const;

  std::array<Times, kExact + 20 * kOfAnOctave> times_;
  int64_t num_measured_ = 0;
};

// The shares of right drafts by position that are assumed before the first: high, so that a model
// and a sequence try.
inline constexpr std::array<double, kMaxDrafts> kFirstAcceptance = {0.9, 0.7, 0.6};

class DraftPolicy {
 public:
  // Drafts waste at most this share of the steps' time, and kFirstCredit steps. Trials leave
  // kKeptCredit of it to drafts that are expected to pay.
  static constexpr double kMostLost = 1.0 / 256, kFirstCredit = 1.5, kKeptCredit = 0.75;

  // Lowers the entries' num_drafts, which are the most that each may have. All entries are of
  // sequences that need one token.
  void choose(std::span<StepEntry> entries);

  // After a choice of no drafts: steps until the next choice, unless a request begins before.
  int64_t rest() const;

  // A sequence had drafts in a step, or none.
  void record_window(Sequence& sequence, int64_t drafts, int64_t accepted);
  // A step of so many sequences without prompts took so long, without the drafting before it.
  void record_step(int64_t sequences, int64_t rows, double seconds);
  // Drafting at most `drafts` tokens for each of some sequences took so long in all.
  void record_drafting(int64_t sequences, int64_t drafts, double seconds);

 private:
  // What a step costs and brings in which each entry has at most so many drafts.
  struct Prospect {
    int64_t rows = 0, drafting = 0;
    double tokens = 0;
  };
  // A number of drafts, for all entries or, to learn what rows cost, for the first of them.
  struct Choice {
    int64_t drafts = 0;
    bool is_trial = false;
    int64_t entries = 0;
  };
  Prospect prospect(std::span<const StepEntry> entries, int64_t drafts) const;
  double seconds(const Prospect& prospect, int64_t drafts) const;
  double drafting_seconds(int64_t sequences, int64_t drafts) const;
  double rate(std::span<const StepEntry> entries, int64_t drafts) const;
  Choice best(std::span<const StepEntry> entries, int64_t most) const;
  // Another number than the best one now and then.
  Choice another(std::span<const StepEntry> entries, int64_t most, const Choice& best);
  Choice trial(std::span<const StepEntry> entries, int64_t drafts) const;
  // Lowers the entries' num_drafts, up to `most`.
  void lower(std::span<StepEntry> entries, int64_t most);
  // Takes what the entries' drafts cost from the credit, by estimate; then what they did cost.
  void charge(std::span<const StepEntry> entries);
  void correct_charge(double step_seconds);
  void add_credit(double steps);
  void drop_poor_drafts(std::span<StepEntry> entries, int64_t drafts) const;
  double acceptance(const Sequence& sequence, size_t position) const;

  // Steps without drafts by sequences, and with drafts by rows: rows of one sequence share its
  // cache, so they cost less.
  RowTimes plain_, drafted_;
  std::array<RowTimes, kMaxDrafts> drafting_;  // by sequences that draft
  // Running mean of the acceptance of all sequences; initial value for new ones.
  std::array<double, kMaxDrafts> acceptance_ = kFirstAcceptance;
  std::array<int64_t, kMaxDrafts> num_outcomes_{};
  int64_t num_trials_ = 0, steps_since_trial_ = 0;
  double credit_ = kFirstCredit;  // steps without drafts
  double num_entries_ = 1;        // of the last choice
  // The charge for the last choice if it has drafts, in steps without drafts, and the measured
  // seconds of its drafting.
  double charged_ = 0, drafting_seconds_ = 0;
  int64_t rest_ = 0;
};

}  // namespace fathom
