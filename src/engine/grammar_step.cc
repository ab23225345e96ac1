#include "engine/grammar_step.h"

#include <algorithm>

namespace fathom {
namespace {

// Below this number of masks, they are computed before another thread has woken.
constexpr int64_t kParallelRows = 4;

std::span<const int32_t> eos_ids(const Sequence& sequence) {
  return std::span(sequence.stop_ids).subspan(static_cast<size_t>(sequence.num_own_stop_ids));
}

bool any(std::span<const uint32_t> mask) {
  return std::any_of(mask.begin(), mask.end(), [](uint32_t word) { return word != 0; });
}

void set_bits(std::vector<uint32_t>& mask, std::span<const int32_t> ids, bool value) {
  for (const int32_t id : ids) {
    const auto word = static_cast<size_t>(id / 32);
    if (word >= mask.size()) mask.resize(word + 1, 0);
    const uint32_t bit = uint32_t{1} << id % 32;
    mask[word] = value ? mask[word] | bit : mask[word] & ~bit;
  }
}

void fill_mask(Sequence& sequence, std::vector<uint32_t>& mask, SampleRow& row) {
  TokenGrammarState& grammar = *sequence.grammar;
  const std::span<const uint32_t> allowed = grammar.allowed();
  const std::span<const int32_t> eos = eos_ids(sequence);
  if (allowed.empty()) {
    if (row.masked.empty()) row.masked = eos;
    return;
  }
  mask.assign(allowed.begin(), allowed.end());
  set_bits(mask, eos, false);
  if (grammar.can_end()) {
    if (!any(mask)) {
      row.masked = {};
      sequence.grammar_ended = eos.empty();
    }
    if (row.masked.empty()) set_bits(mask, eos, true);
  }
  sequence.grammar_stuck = !sequence.grammar_ended && !any(mask);
  row.allowed = mask;
}

void accept_token(Sequence& sequence, int32_t id, std::vector<uint32_t>& mask) {
  TokenGrammarState& grammar = *sequence.grammar;
  const auto& stop_ids = sequence.stop_ids;
  if (std::find(stop_ids.begin(), stop_ids.end(), id) != stop_ids.end()) return;
  // A grammar that rejects a token it allowed gets an empty mask, which ends the sequence.
  if (!grammar.accept(id) || !grammar.can_end()) return;
  const std::span<const uint32_t> allowed = grammar.allowed();
  mask.assign(allowed.begin(), allowed.end());
  set_bits(mask, eos_ids(sequence), false);
  sequence.grammar_ended = !any(mask);
}

}  // namespace

template <typename Body>
void GrammarStep::for_each(const Stream* stream, const Body& body) {
  const int64_t count = std::ssize(rows_);
  if (stream == nullptr || count < kParallelRows) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  stream->pool().parallel_for(count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) body(i);
  });
}

void GrammarStep::fill_masks(std::span<SampleRow> rows, const Stream* stream) {
  if (masks_.size() < rows_.size()) masks_.resize(rows_.size());
  for_each(stream,
           [&](int64_t i) { fill_mask(*rows_[i].sequence, masks_[i], rows[rows_[i].index]); });
}

void GrammarStep::accept(std::span<const SampledToken> sampled, const Stream* stream) {
  for_each(stream, [&](int64_t i) {
    const int32_t id = sampled[rows_[i].index].id;
    if (id >= 0) accept_token(*rows_[i].sequence, id, masks_[i]);
  });
}

}  // namespace fathom
