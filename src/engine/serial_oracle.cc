#include "engine/serial_oracle.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "base/utf8.h"
#include "ops/sampling/sample.h"

namespace fathom {
namespace {

TokenLogprob logprob_of(const SampledToken& token) { return {token.id, token.logprob, token.top}; }

std::string raw_text(const Tokenizer& tokenizer, const std::vector<int32_t>& ids, size_t count,
                     bool skip_special) {
  std::string bytes;
  for (size_t i = 0; i < count; ++i) {
    if (!skip_special || !tokenizer.is_special(ids[i])) bytes += tokenizer.token_bytes(ids[i]);
  }
  return bytes;
}

// The first byte that may be searched for stop strings: after the first min_tokens tokens.
size_t search_begin(const Tokenizer& tokenizer, const std::vector<int32_t>& ids,
                    const SamplingParams& params) {
  const size_t count = std::min(ids.size(), static_cast<size_t>(params.min_tokens));
  const std::string bytes = raw_text(tokenizer, ids, count, params.skip_special_tokens);
  return replace_ill_formed(bytes.substr(0, complete_utf8_prefix(bytes))).size();
}

// Cuts the text at the stop string that is complete first. Returns whether there is one.
bool cut_at_stop(const Tokenizer& tokenizer, const SamplingParams& params, Answer& answer) {
  const std::string bytes =
      raw_text(tokenizer, answer.ids, answer.ids.size(), params.skip_special_tokens);
  const std::string text = replace_ill_formed(bytes.substr(0, complete_utf8_prefix(bytes)));
  const size_t begin = search_begin(tokenizer, answer.ids, params);
  for (size_t end = begin + 1; end <= text.size(); ++end) {
    std::optional<std::string> longest;
    for (const std::string& stop : params.stop) {
      const bool matches =
          end >= begin + stop.size() && text.compare(end - stop.size(), stop.size(), stop) == 0;
      if (matches && (!longest || stop.size() > longest->size())) longest = stop;
    }
    if (!longest) continue;
    answer.text = text.substr(0, params.include_stop_in_output ? end : end - longest->size());
    answer.matched_stop = *longest;
    answer.finish = FinishReason::kStop;
    return true;
  }
  return false;
}

bool contains(std::span<const uint32_t> mask, int32_t id) {
  const auto word = static_cast<size_t>(id / 32);
  return word < mask.size() && (mask[word] >> id % 32 & 1) != 0;
}

// Whether nothing but an end of sequence may follow.
bool has_ended(TokenGrammarState& grammar) {
  if (!grammar.can_end()) return false;
  const std::span<const uint32_t> allowed = grammar.allowed();
  for (int32_t id = 0; id < kFakeEos; ++id) {
    if (contains(allowed, id)) return false;
  }
  return true;
}

// What the grammar leaves of a row. False: nothing may follow.
bool choose_mask(TokenGrammarState& grammar, std::span<const int32_t> eos_ids,
                 std::vector<uint32_t>& mask, SampleRow& row) {
  const std::span<const uint32_t> allowed = grammar.allowed();
  if (allowed.empty()) {  // it has not begun
    if (row.masked.empty()) row.masked = eos_ids;
    return true;
  }
  mask.assign(allowed.begin(), allowed.end());
  mask.resize(10);
  if (has_ended(grammar)) row.masked = {};
  if (grammar.can_end() && row.masked.empty()) {
    for (const int32_t id : eos_ids) mask[static_cast<size_t>(id / 32)] |= uint32_t{1} << id % 32;
  }
  row.allowed = mask;
  return std::any_of(mask.begin(), mask.end(), [](uint32_t word) { return word != 0; });
}

}  // namespace

Answer serial_answer(const FakeModel& model, const Tokenizer& tokenizer, const Request& request,
                     int index) {
  const SamplingParams& params = request.sampling;
  const SampleOptions options{.temperature = params.temperature,
                              .top_p = params.top_p,
                              .min_p = params.min_p,
                              .top_k = params.top_k,
                              .repetition_penalty = params.repetition_penalty,
                              .presence_penalty = params.presence_penalty,
                              .frequency_penalty = params.frequency_penalty,
                              .logit_bias = params.logit_bias,
                              .seed = *params.seed,
                              .stream = static_cast<uint64_t>(index)};
  std::vector<int32_t> stop_ids = params.stop_token_ids;
  if (!params.ignore_eos) stop_ids.push_back(kFakeEos);
  const std::vector<int32_t> eos_ids =
      params.ignore_eos ? std::vector<int32_t>() : std::vector<int32_t>{kFakeEos};
  std::unique_ptr<TokenGrammarState> grammar;
  if (request.grammar) grammar = request.grammar->start(request.grammar_begins_after);
  TokenHistory history;
  history.add_prompt(request.prompt_ids);
  SampleScratch scratch;
  SampledToken token;
  std::vector<float> logits;
  Answer answer;
  const auto without_token = [&](std::string error) {
    answer.finish = FinishReason::kError;
    answer.error = std::move(error);
    answer.text = replace_ill_formed(
        raw_text(tokenizer, answer.ids, answer.ids.size(), params.skip_special_tokens));
    return answer;
  };
  uint64_t hash = 0;
  if (params.prompt_logprobs >= 0 && index == 0) answer.prompt_logprobs.push_back(std::nullopt);
  for (size_t i = 0; i < request.prompt_ids.size(); ++i) {
    hash = FakeModel::extend(hash, request.prompt_ids[i]);
    if (params.prompt_logprobs < 0 || index > 0 || i + 1 == request.prompt_ids.size()) continue;
    model.logits_after(hash, logits);
    sample(logits, {.num_logprobs = params.prompt_logprobs, .given_id = request.prompt_ids[i + 1]},
           scratch, token);
    answer.prompt_logprobs.push_back(logprob_of(token));
  }
  while (true) {
    model.logits_after(hash, logits);
    SampleRow row{.options = &options,
                  .history = &history,
                  .position = request.prompt_ids.size() + answer.ids.size(),
                  .num_logprobs = params.logprobs};
    if (std::ssize(answer.ids) < params.min_tokens) row.masked = stop_ids;
    std::vector<uint32_t> mask;
    if (grammar && !choose_mask(*grammar, eos_ids, mask, row)) {
      return without_token(
          fmt::format("the grammar has a dead end: nothing may follow the {} tokens of the answer "
                      "so far, which is not whole",
                      answer.ids.size()));
    }
    sample(logits, row, scratch, token);
    if (token.id < 0) {
      return without_token(fmt::format(
          "no token that the grammar allows has a finite logit at position {}", row.position - 1));
    }
    answer.ids.push_back(token.id);
    history.add_output(token.id);
    hash = FakeModel::extend(hash, token.id);
    if (params.logprobs >= 0) answer.logprobs.push_back(logprob_of(token));
    const bool is_stop_id = std::find(stop_ids.begin(), stop_ids.end(), token.id) != stop_ids.end();
    const bool grammar_ends =
        grammar && !is_stop_id && grammar->accept(token.id) && has_ended(*grammar);
    if (!is_stop_id && cut_at_stop(tokenizer, params, answer)) return answer;
    if (is_stop_id) {
      answer.finish = FinishReason::kStop;
      answer.matched_stop = token.id;
    } else if (grammar_ends) {
      answer.finish = FinishReason::kStop;
    } else if (std::ssize(answer.ids) == *params.max_tokens) {
      answer.finish = FinishReason::kLength;
    } else {
      continue;
    }
    const size_t shown = answer.ids.size() - (is_stop_id && !params.include_stop_in_output);
    answer.text =
        replace_ill_formed(raw_text(tokenizer, answer.ids, shown, params.skip_special_tokens));
    return answer;
  }
}

void AnswerCollector::add(const Event& event) {
  EXPECT_FALSE(last) << "an event after the last";
  ASSERT_LT(static_cast<size_t>(event.index), answers.size());
  Answer& answer = answers[static_cast<size_t>(event.index)];
  EXPECT_FALSE(answer.finish) << "an event after the choice's last";
  EXPECT_TRUE(is_valid_utf8(event.text)) << "half a character";
  EXPECT_TRUE(event.prompt_logprobs.empty() || answer.ids.empty()) << "first event only";
  answer.ids.insert(answer.ids.end(), event.ids.begin(), event.ids.end());
  accepted_drafts += std::max<int64_t>(0, std::ssize(event.ids) - 1);
  answer.text += event.text;
  answer.logprobs.insert(answer.logprobs.end(), event.logprobs.begin(), event.logprobs.end());
  answer.prompt_logprobs.insert(answer.prompt_logprobs.end(), event.prompt_logprobs.begin(),
                                event.prompt_logprobs.end());
  if (event.finish) {
    answer.finish = event.finish;
    answer.matched_stop = event.matched_stop;
    if (event.finish == FinishReason::kError) answer.error = event.error.message;
    usages.push_back(event.usage);
    ++num_finals;
    EXPECT_EQ(event.usage.completion_tokens, std::ssize(answer.ids));
    EXPECT_LE(event.timings.queued, event.timings.started);
    EXPECT_LE(event.timings.started, event.timings.first_token);
    EXPECT_LE(event.timings.first_token, event.timings.finished);
  }
  last = event.last;
  EXPECT_EQ(last, num_finals == static_cast<int>(answers.size()));
}

void expect_equal(const Answer& actual, const Answer& expected, const std::string& what) {
  EXPECT_EQ(actual.ids, expected.ids) << what;
  EXPECT_EQ(actual.text, expected.text) << what;
  EXPECT_EQ(actual.finish, expected.finish) << what;
  EXPECT_EQ(actual.matched_stop, expected.matched_stop) << what;
  EXPECT_EQ(actual.error, expected.error) << what;
  ASSERT_EQ(actual.logprobs.size(), expected.logprobs.size()) << what;
  for (size_t i = 0; i < actual.logprobs.size(); ++i) {
    EXPECT_EQ(actual.logprobs[i].id, expected.logprobs[i].id) << what;
    EXPECT_EQ(actual.logprobs[i].logprob, expected.logprobs[i].logprob) << what;
    EXPECT_EQ(actual.logprobs[i].top, expected.logprobs[i].top) << what;
  }
  ASSERT_EQ(actual.prompt_logprobs.size(), expected.prompt_logprobs.size()) << what;
  for (size_t i = 0; i < actual.prompt_logprobs.size(); ++i) {
    ASSERT_EQ(actual.prompt_logprobs[i].has_value(), i > 0) << what;
    if (i == 0) continue;
    EXPECT_EQ(actual.prompt_logprobs[i]->id, expected.prompt_logprobs[i]->id) << what;
    EXPECT_EQ(actual.prompt_logprobs[i]->logprob, expected.prompt_logprobs[i]->logprob) << what;
    EXPECT_EQ(actual.prompt_logprobs[i]->top, expected.prompt_logprobs[i]->top) << what;
  }
}

}  // namespace fathom
