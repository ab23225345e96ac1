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

void add_unknown(Sequence& sequence, int32_t placeholder) {
  sequence.tokens.push_back(placeholder);
  ++sequence.num_unknown;
}

// The one place where a token becomes the sequence's. `is_last`: no sampled token follows it.
void commit_token(Sequence& sequence, const SampledToken& sampled, bool is_last, Event& event) {
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
  } else if (sequence.grammar_ended && is_last) {
    event.finish = FinishReason::kStop;
  } else if (sequence.known_len() == sequence.max_len) {
    event.finish = FinishReason::kLength;
  }
  if (event.finish) flush_text(sequence, event);
}

// How the token is sampled that follows the sequence's newest and `draft` of its drafts.
SampleRow sample_row(const Sequence& sequence, int64_t draft) {
  const int64_t position = sequence.len() + draft;
  SampleRow row{.options = &sequence.sample_options,
                .history = sequence.history.get(),
                .position = static_cast<uint64_t>(position),
                .num_logprobs = sequence.num_logprobs};
  if (row.history != nullptr && draft > 0) {
    row.history = &sequence.draft_histories[static_cast<size_t>(draft - 1)];
  }
  const SamplingParams& params = sequence.request->request.sampling;
  if (position - sequence.prompt_len < params.min_tokens) row.masked = sequence.stop_ids;
  return row;
}

// Copies, since drafts that are rejected leave no trace.
void add_draft_histories(Sequence& sequence, int64_t num_drafts) {
  if (!sequence.history) return;
  sequence.draft_histories.resize(static_cast<size_t>(num_drafts));
  const TokenHistory* before = sequence.history.get();
  for (int64_t i = 0; i < num_drafts; ++i) {
    TokenHistory& history = sequence.draft_histories[static_cast<size_t>(i)];
    history = *before;
    history.add_output(sequence.drafts[static_cast<size_t>(i)]);
    before = &history;
  }
}

// How many of the sampled rows are tokens: the first, and each whose draft is the token before.
int64_t run_length(const StepEntry& entry, std::span<const SampledToken> sampled) {
  if (!entry.samples) return 0;
  int64_t length = 1;
  while (length <= entry.num_drafts &&
         sampled[static_cast<size_t>(length - 1)].id ==
             entry.sequence->drafts[static_cast<size_t>(length - 1)]) {
    ++length;
  }
  return length;
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

void choose_draft_rows(Step& step) {
  step.rows.clear();
  for (const StepEntry& entry : step.plan.entries) {
    if (entry.num_drafts == 0) continue;
    SampleRow row = sample_row(*entry.sequence, 0);
    row.num_logprobs = -1;
    row.row = std::ssize(step.rows);
    step.rows.push_back(row);
  }
}

void take_drafts(StepPlan& plan, std::span<const int32_t> drafts) {
  for (StepEntry& entry : plan.entries) {
    const auto own = drafts.first(static_cast<size_t>(entry.num_drafts));
    drafts = drafts.subspan(own.size());
    const auto& stop_ids = entry.sequence->stop_ids;
    const auto end = std::find_first_of(own.begin(), own.end(), stop_ids.begin(), stop_ids.end());
    entry.sequence->drafts.assign(own.begin(), end);
    entry.num_drafts = std::ssize(entry.sequence->drafts);
  }
  FATHOM_CHECK(drafts.empty(), "{} drafts too many", drafts.size());
}

void choose_rows(Step& step, const Stream* stream) {
  step.rows.clear();
  step.grammars.clear();
  for (StepEntry& entry : step.plan.entries) {
    if (entry.samples && entry.sequence->grammar) step.grammars.add(entry);
  }
  if (!step.grammars.empty()) step.grammars.fill_masks(stream);
  const auto add = [&](SampleRow row) {
    row.row = std::ssize(step.rows);
    step.rows.push_back(row);
  };
  size_t num_grammars = 0;
  for (const StepEntry& entry : step.plan.entries) {
    Sequence& sequence = *entry.sequence;
    for (int64_t i = 0; i < entry.num_prompt_logits; ++i) {
      add({.num_logprobs = sequence.request->request.sampling.prompt_logprobs,
           .given_id = sequence.tokens[entry.first_prompt_logit + i + 1]});
    }
    if (!entry.samples) continue;
    add_draft_histories(sequence, entry.num_drafts);
    const bool has_grammar = sequence.grammar != nullptr;
    if (has_grammar) step.grammars.set_first_row(num_grammars, step.rows.size());
    for (int64_t draft = 0; draft <= entry.num_drafts; ++draft) {
      SampleRow row = sample_row(sequence, draft);
      if (has_grammar) step.grammars.apply(num_grammars, draft, row);
      add(row);
    }
    num_grammars += has_grammar;
  }
}

void add_unknown_tokens(const Step& step) {
  int32_t row = 0;
  for (const StepEntry& entry : step.plan.entries) {
    row += static_cast<int32_t>(entry.num_prompt_logits);
    if (!entry.samples) continue;
    add_unknown(*entry.sequence, -1 - row);
    row += static_cast<int32_t>(entry.num_sampled());
  }
}

StepResults::StepResults(Step& step, std::span<const SampledToken> sampled, const Stream* stream)
    : left_(sampled) {
  FATHOM_CHECK(sampled.size() == step.rows.size(), "{} rows, {} tokens", step.rows.size(),
               sampled.size());
  std::span<const SampledToken> rest = sampled;
  for (StepEntry& entry : step.plan.entries) {
    rest = rest.subspan(static_cast<size_t>(entry.num_prompt_logits));
    entry.run_length = run_length(entry, rest);
    rest = rest.subspan(static_cast<size_t>(entry.num_sampled()));
  }
  if (!step.grammars.empty()) step.grammars.accept(sampled, stream);
}

bool StepResults::append(const StepEntry& entry, Event& event) {
  Sequence& sequence = *entry.sequence;
  // Advances past the entry's results first, so that the next entry finds its own even after
  // std::bad_alloc.
  const auto count = static_cast<size_t>(entry.num_prompt_logits + entry.num_sampled());
  const auto results = left_.first(count);
  left_ = left_.subspan(count);
  if (sequence.phase == Sequence::Phase::kFinished) return false;
  for (int64_t i = 0; i < entry.num_prompt_logits; ++i) {
    sequence.prompt_logprobs.push_back(logprob_of(results[i]));
  }
  if (!entry.samples) return false;
  if (sequence.output_len() == 0) event.prompt_logprobs = std::move(sequence.prompt_logprobs);
  const auto tokens = results.subspan(static_cast<size_t>(entry.num_prompt_logits));
  for (int64_t i = 0; i < entry.run_length && !event.finish; ++i) {
    if (i > 0) add_unknown(sequence, -1);
    const SampledToken& sampled = tokens[static_cast<size_t>(i)];
    if (sampled.id < 0) {
      end_without_token(sequence, event);
    } else {
      commit_token(sequence, sampled, i + 1 == entry.run_length, event);
    }
  }
  return true;
}

}  // namespace fathom
