// How many drafts each sequence of a step gets: as many as give the most tokens a second, by each
// sequence's acceptance so far and the measured times of steps. None where drafting does not pay.
//
// It only affects speed. Engine thread only.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "engine/step_plan.h"

namespace fathom {

// Seconds by number of rows, decaying averages. Where nothing was measured it estimates from the
// nearest number of rows that was, and what was measured long ago drifts towards what the last
// measurement makes of it: a bad first impression is tried again.
class RowTimes {
 public:
  void add(int64_t rows, double seconds);
  // Relative to a step of one row before anything was measured.
  double at(int64_t rows) const;

 private:
  static constexpr size_t kExact = 16;      // numbers of rows with an entry of their own
  static constexpr size_t kOfAnOctave = 4;  // beyond them
  static size_t index_of(int64_t rows);
  static double rows_of(size_t index);

  std::array<double, kExact + 20 * kOfAnOctave> seconds_{};  // 0: not measured
};

class DraftPolicy {
 public:
  // Lowers the entries' num_drafts, which are the most that each may have. All entries are of
  // sequences that need one token.
  void choose(std::span<StepEntry> entries) const;

  // A sequence had drafts in a step, or none.
  static void record_window(Sequence& sequence, int64_t drafts, int64_t accepted);
  // A step of `rows` rows without prompts took so long, without the drafting before it.
  void record_step(int64_t rows, double seconds) { steps_.add(rows, seconds); }
  // Drafting took so long for each of the drafts of `sequences` sequences.
  void record_drafting(int64_t sequences, double seconds) { drafting_.add(sequences, seconds); }

 private:
  RowTimes steps_, drafting_;
};

}  // namespace fathom
