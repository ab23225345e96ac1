// The part of a step that concerns sequences with a grammar: fills their rows' masks before
// sampling, and feeds the sampled tokens to the grammars after it. Both are spread over the
// stream's threads, because one mask takes some 10 us and sequences without a grammar wait for it.
//
// Keeps its memory from step to step. Engine thread only.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/step_plan.h"
#include "model/forward_batch.h"

namespace fathom {

class GrammarStep {
 public:
  void clear() { rows_.clear(); }
  bool empty() const { return rows_.empty(); }

  // Adds an entry that samples, of a sequence with a grammar. It stays where it is until the step
  // has ended.
  void add(StepEntry& entry) { rows_.push_back({&entry}); }

  // Computes the masks of the entries' sampled rows: of each draft's from the state that the
  // grammar would have behind it, which is reverted then. An end-of-sequence id is allowed where
  // the grammar can end, and is forced where nothing else can follow, whatever min_tokens says; it
  // is not allowed before the grammar has begun. Sets grammar_ended where the text is complete,
  // nothing can follow and there is no such id; sets grammar_stuck where the text is incomplete and
  // nothing can follow. An entry loses the drafts from the first on that the grammar forbids, or
  // behind which nothing can follow.
  void fill_masks(const Stream* stream);

  // Gives a row what fill_masks() found for it: of the i-th entry added, behind so many drafts.
  void apply(size_t i, int64_t drafts, SampleRow& row) const;
  // The i-th entry's sampled rows begin at this index of the step's.
  void set_first_row(size_t i, size_t row) { rows_[i].first_row = row; }

  // Feeds the entries' tokens to the grammars. Where nothing may follow one, sets grammar_ended and
  // ends the entry's run with it.
  void accept(std::span<const SampledToken> sampled, const Stream* stream);

 private:
  struct Row {
    StepEntry* entry;
    size_t first_row = 0;
  };
  // What a row may choose, as SampleRow has it.
  struct Mask {
    std::vector<uint32_t> words;  // never shrinks
    bool is_all_allowed = false;  // instead of `words`
    std::span<const int32_t> masked;
  };
  enum class End { kNo, kEnded, kStuck };
  using Masks = std::array<Mask, 1 + kMaxDrafts>;

  template <typename Body>
  void for_each(const Stream* stream, const Body& body);
  static void fill(StepEntry& entry, Masks& masks);
  static End fill_mask(const Sequence& sequence, int64_t drafts, Mask& mask);
  static bool allows(const Mask& mask, int32_t id);
  static void accept_run(StepEntry& entry, std::span<const SampledToken> sampled, Mask& scratch);

  std::vector<Row> rows_;
  std::vector<Masks> masks_;  // [rows_]; never shrinks
};

}  // namespace fathom
