#include "engine/postprocess.h"

#include <algorithm>

#include "base/check.h"

namespace fathom {
namespace {

TokenLogprob logprob_of(const SampledToken& sampled) {
  return {sampled.id, sampled.logprob, sampled.top};
}

// Appends the token's text, and sets `finish` if a stop string has ended it.
void append_text(Sequence& sequence, int32_t id, bool is_stop_id, Event& event) {
  if (!sequence.detokenizer) return;
  const SamplingParams& params = sequence.request->request.sampling;
  if (is_stop_id) {
    if (!params.include_stop_in_output) return;
    sequence.stop_filter->pass(sequence.detokenizer->push(id), event.text);
    return;
  }
  const std::string piece = sequence.detokenizer->push(id);
  if (sequence.output_len() <= params.min_tokens) {
    sequence.stop_filter->pass(piece, event.text);
    return;
  }
  if (const auto matched = sequence.stop_filter->push(piece, event.text)) {
    event.finish = FinishReason::kStop;
    event.matched_stop = params.stop[*matched];
  }
}

void flush_text(Sequence& sequence, Event& event) {
  if (!sequence.detokenizer) return;
  sequence.stop_filter->flush(event.text);
  event.text += sequence.detokenizer->flush();
}

void append_token(Sequence& sequence, const SampledToken& sampled, Event& event) {
  sequence.tokens[static_cast<size_t>(sequence.known_len())] = sampled.id;
  --sequence.num_unknown;
  if (sequence.history) sequence.history->add_output(sampled.id);
  event.ids.push_back(sampled.id);
  if (sequence.num_logprobs >= 0) event.logprobs.push_back(logprob_of(sampled));

  const bool is_stop_id = std::find(sequence.stop_ids.begin(), sequence.stop_ids.end(),
                                    sampled.id) != sequence.stop_ids.end();
  append_text(sequence, sampled.id, is_stop_id, event);
  if (event.finish) return;  // ended by a stop string: no text is held back
  if (is_stop_id) {
    event.finish = FinishReason::kStop;
    event.matched_stop = sampled.id;
  } else if (sequence.grammar_ended) {
    event.finish = FinishReason::kStop;
  } else if (sequence.known_len() == sequence.max_len) {
    event.finish = FinishReason::kLength;
  }
  if (event.finish) flush_text(sequence, event);
}

// Ends a sequence for which no token could be chosen.
void end_without_token(Sequence& sequence, Event& event) {
  if (sequence.grammar_ended) {
    event.finish = FinishReason::kStop;
  } else if (sequence.grammar_stuck) {
    event.finish = FinishReason::kError;
    event.error = {Code::kInvalidArgument,
                   fmt::format("the grammar has a dead end: nothing may follow the {} tokens of "
                               "the answer so far, which is not whole",
                               sequence.output_len())};
  } else {
    event.finish = FinishReason::kError;
    const char* const what = sequence.grammar
                                 ? "no token that the grammar allows has a finite logit"
                                 : "the model's logits have no finite value";
    event.error = {Code::kInternal,
                   fmt::format("{} at position {}", what, sequence.known_len() - 1)};
  }
  flush_text(sequence, event);
}

}  // namespace

void choose_rows(Step& step, const Stream* stream) {
  step.rows.clear();
  step.grammars.clear();
  const auto add = [&](SampleRow row) {
    row.row = std::ssize(step.rows);
    step.rows.push_back(row);
  };
  for (const StepEntry& entry : step.plan.entries) {
    Sequence& sequence = *entry.sequence;
    const SamplingParams& params = sequence.request->request.sampling;
    for (int64_t i = 0; i < entry.num_prompt_logits; ++i) {
      add({.num_logprobs = params.prompt_logprobs,
           .given_id = sequence.tokens[entry.first_prompt_logit + i + 1]});
    }
    if (!entry.samples) continue;
    SampleRow row{.options = &sequence.sample_options,
                  .history = sequence.history.get(),
                  .position = static_cast<uint64_t>(sequence.len()),
                  .num_logprobs = sequence.num_logprobs};
    if (sequence.len() - sequence.prompt_len < params.min_tokens) row.masked = sequence.stop_ids;
    if (sequence.grammar) step.grammars.add(sequence, step.rows.size());
    add(row);
  }
  if (!step.grammars.empty()) step.grammars.fill_masks(step.rows, stream);
}

void add_unknown_tokens(const Step& step) {
  int32_t row = 0;
  for (const StepEntry& entry : step.plan.entries) {
    row += static_cast<int32_t>(entry.num_prompt_logits);
    if (!entry.samples) continue;
    entry.sequence->tokens.push_back(-1 - row++);
    ++entry.sequence->num_unknown;
  }
}

StepResults::StepResults(Step& step, std::span<const SampledToken> sampled, const Stream* stream)
    : left_(sampled) {
  FATHOM_CHECK(sampled.size() == step.rows.size(), "{} rows, {} tokens", step.rows.size(),
               sampled.size());
  if (!step.grammars.empty()) step.grammars.accept(sampled, stream);
}

bool StepResults::append(const StepEntry& entry, Event& event) {
  Sequence& sequence = *entry.sequence;
  // Advances past the entry's results first, so that the next entry finds its own even after
  // std::bad_alloc.
  const auto count = static_cast<size_t>(entry.num_prompt_logits + entry.samples);
  const auto results = left_.first(count);
  left_ = left_.subspan(count);
  if (sequence.phase == Sequence::Phase::kFinished) return false;
  for (int64_t i = 0; i < entry.num_prompt_logits; ++i) {
    sequence.prompt_logprobs.push_back(logprob_of(results[i]));
  }
  if (!entry.samples) return false;
  const SampledToken& sampled = results.back();
  if (sequence.output_len() == 0) event.prompt_logprobs = std::move(sequence.prompt_logprobs);
  if (sampled.id < 0) {
    end_without_token(sequence, event);
    return true;
  }
  append_token(sequence, sampled, event);
  return true;
}

}  // namespace fathom
