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

void GrammarStep::fill_masks(const Stream* stream) {
  if (masks_.size() < rows_.size()) masks_.resize(rows_.size());
  for_each(stream, [&](int64_t i) { fill(*rows_[i].entry, masks_[i]); });
}

void GrammarStep::fill(StepEntry& entry, Masks& masks) {
  Sequence& sequence = *entry.sequence;
  End end = fill_mask(sequence, 0, masks[0]);
  sequence.grammar_ended = end == End::kEnded;
  sequence.grammar_stuck = end == End::kStuck;
  int64_t accepted = 0;
  while (end == End::kNo && accepted < entry.num_drafts) {
    const int32_t id = sequence.drafts[static_cast<size_t>(accepted)];
    if (!allows(masks[static_cast<size_t>(accepted)], id) || !sequence.grammar->accept(id)) break;
    ++accepted;
    end = fill_mask(sequence, accepted, masks[static_cast<size_t>(accepted)]);
  }
  sequence.grammar->rollback(accepted);
  // Behind the last of them nothing may follow: there is no token to sample.
  if (accepted > 0 && end != End::kNo) --accepted;
  entry.num_drafts = accepted;
}

GrammarStep::End GrammarStep::fill_mask(const Sequence& sequence, int64_t drafts, Mask& mask) {
  TokenGrammarState& grammar = *sequence.grammar;
  const std::span<const uint32_t> allowed = grammar.allowed();
  const std::span<const int32_t> eos = eos_ids(sequence);
  const SamplingParams& params = sequence.request->request.sampling;
  const bool is_short = sequence.len() + drafts - sequence.prompt_len < params.min_tokens;
  mask.masked = is_short ? std::span<const int32_t>(sequence.stop_ids) : std::span<const int32_t>();
  mask.is_all_allowed = allowed.empty();
  if (mask.is_all_allowed) {
    if (mask.masked.empty()) mask.masked = eos;
    return End::kNo;
  }
  mask.words.assign(allowed.begin(), allowed.end());
  set_bits(mask.words, eos, false);
  End end = End::kNo;
  if (grammar.can_end()) {
    if (!any(mask.words)) {
      mask.masked = {};
      if (eos.empty()) end = End::kEnded;
    }
    if (mask.masked.empty()) set_bits(mask.words, eos, true);
  }
  if (end == End::kNo && !any(mask.words)) end = End::kStuck;
  return end;
}

bool GrammarStep::allows(const Mask& mask, int32_t id) {
  if (mask.is_all_allowed) return true;
  const auto word = static_cast<size_t>(id / 32);
  return word < mask.words.size() && (mask.words[word] >> id % 32 & 1) != 0;
}

void GrammarStep::apply(size_t i, int64_t drafts, SampleRow& row) const {
  const Mask& mask = masks_[i][static_cast<size_t>(drafts)];
  row.masked = mask.masked;
  if (!mask.is_all_allowed) row.allowed = mask.words;
}

void GrammarStep::accept(std::span<const SampledToken> sampled, const Stream* stream) {
  for_each(stream, [&](int64_t i) {
    StepEntry& entry = *rows_[i].entry;
    const auto run = sampled.subspan(rows_[i].first_row, static_cast<size_t>(entry.run_length));
    accept_run(entry, run, masks_[i][0]);
  });
}

void GrammarStep::accept_run(StepEntry& entry, std::span<const SampledToken> sampled,
                             Mask& scratch) {
  Sequence& sequence = *entry.sequence;
  TokenGrammarState& grammar = *sequence.grammar;
  const auto& stop_ids = sequence.stop_ids;
  for (size_t i = 0; i < sampled.size(); ++i) {
    const int32_t id = sampled[i].id;
    if (id < 0 || std::find(stop_ids.begin(), stop_ids.end(), id) != stop_ids.end()) return;
    // A grammar that rejects a token it allowed gets an empty mask, which ends the sequence.
    if (!grammar.accept(id) || !grammar.can_end()) continue;
    const std::span<const uint32_t> allowed = grammar.allowed();
    scratch.words.assign(allowed.begin(), allowed.end());
    set_bits(scratch.words, eos_ids(sequence), false);
    sequence.grammar_ended = !any(scratch.words);
    if (!sequence.grammar_ended) continue;
    entry.run_length = static_cast<int64_t>(i) + 1;
    return;
  }
}

}  // namespace fathom
