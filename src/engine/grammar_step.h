// A step's work for sequences with a grammar: before sampling the masks of their rows, after it the
// tokens that were chosen. Both spread over the stream's threads, because a mask takes some ten
// microseconds and neighbours without a grammar wait for it.
//
// Keeps its memory from step to step. Engine thread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/sequence.h"

namespace fathom {

class GrammarStep {
 public:
  void clear() { rows_.clear(); }
  bool empty() const { return rows_.empty(); }

  // The sequence, which has a grammar, is sampled from rows[row].
  void add(Sequence& sequence, size_t row) { rows_.push_back({&sequence, row}); }

  // Sets what each row may choose. An end of sequence may be chosen where the grammar can end, and
  // must be where nothing else can follow, whatever min_tokens says; it may not before the grammar
  // has begun. Sets grammar_ended where nothing can follow and there is no such id,
  // grammar_stuck where nothing can follow what is not whole.
  void fill_masks(std::span<SampleRow> rows, const Stream* stream);

  // Takes the chosen tokens, and sets grammar_ended where nothing may follow them.
  void accept(std::span<const SampledToken> sampled, const Stream* stream);

 private:
  struct Row {
    Sequence* sequence;
    size_t index;
  };
  template <typename Body>
  void for_each(const Stream* stream, const Body& body);

  std::vector<Row> rows_;
  std::vector<std::vector<uint32_t>> masks_;  // [rows_]; only grows
};

}  // namespace fathom
