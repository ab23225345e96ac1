// The part of a step that concerns sequences with a grammar: fills their rows' masks before
// sampling, and feeds the sampled tokens to the grammars after it. Both are spread over the
// stream's threads, because one mask takes some 10 us and sequences without a grammar wait for it.
//
// Keeps its memory from step to step. Engine thread only.
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

  // Adds a sequence with a grammar, which is sampled from rows[row].
  void add(Sequence& sequence, size_t row) { rows_.push_back({&sequence, row}); }

  // Sets each row's mask. An end-of-sequence id is allowed where the grammar can end, and is forced
  // where nothing else can follow, whatever min_tokens says; it is not allowed before the grammar
  // has begun. Sets grammar_ended where the text is complete, nothing can follow and there is no
  // such id; sets grammar_stuck where the text is incomplete and nothing can follow.
  void fill_masks(std::span<SampleRow> rows, const Stream* stream);

  // Feeds the sampled tokens to the grammars. Sets grammar_ended where nothing may follow.
  void accept(std::span<const SampledToken> sampled, const Stream* stream);

 private:
  struct Row {
    Sequence* sequence;
    size_t index;
  };
  template <typename Body>
  void for_each(const Stream* stream, const Body& body);

  std::vector<Row> rows_;
  std::vector<std::vector<uint32_t>> masks_;  // [rows_]; never shrinks
};

}  // namespace fathom
