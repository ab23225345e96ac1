#include "cli/eval_run.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/progress.h"
#include "base/utf8.h"
#include "chat/prompt_ids.h"
#include "cli/batch_run.h"

namespace fathom {
namespace {

// The text to score: with special tokens, without the final end-of-sequence token.
std::string answer_text(const LoadedEngine& loaded, const Answer& answer) {
  std::vector<int32_t> ids = answer.ids;
  if (answer.finish == FinishReason::kStop && !ids.empty()) ids.pop_back();
  return loaded.tokenizer->decode(ids);
}

Result<std::vector<Request>> item_requests(const LoadedEngine& loaded, const EvalSet& set) {
  if (!loaded.chat_format) return tl::unexpected<Status>(loaded.chat_format.error());
  std::vector<Request> requests;
  for (const EvalItem& item : set.items) {
    const auto prompt = render(*loaded.chat_format, item.conversation);
    if (!prompt) {
      return with_context(fmt::format("{} line {}: ", set.path, item.line), prompt.error());
    }
    Request request;
    request.prompt_ids = encode_prompt(*loaded.tokenizer, *prompt);
    request.sampling.temperature = 0;
    request.sampling.max_tokens = max_answer_tokens(item.check, item.conversation.thinking);
    requests.push_back(std::move(request));
  }
  return requests;
}

Result<EvalResult> run_items(const LoadedEngine& loaded, const EvalSet& set, bool show_progress) {
  FATHOM_TRY(const std::vector<Request> requests, item_requests(loaded, set));
  BatchRun run;
  {
    Progress progress(set.name, show_progress ? static_cast<int64_t>(requests.size()) : 0,
                      Progress::Unit::kItems);
    auto ran = run_batch(*loaded.engine, requests, 0, [&](size_t) { progress.add(1); });
    if (!ran) return with_context(set.path + ": ", ran.error());
    run = std::move(*ran);
  }
  EvalResult result;
  result.name = set.name;
  result.seconds = run.seconds();
  for (size_t i = 0; i < set.items.size(); ++i) {
    const EvalItem& item = set.items[i];
    const Answer& answer = run.answers[i].answer;
    const std::string text = answer_text(loaded, answer);
    const bool right = is_right(item.check, item.expected, *loaded.chat_format, text);
    for (EvalTally* tally :
         {&result.all, item.conversation.thinking ? &result.thinking : &result.direct}) {
      tally->right += right ? 1 : 0;
      ++tally->of;
    }
    result.ended += answer.finish == FinishReason::kStop ? 1 : 0;
    result.generated_tokens += static_cast<int64_t>(answer.ids.size());
    result.decoded_tokens += std::max<int64_t>(0, std::ssize(answer.ids) - 1);
    result.decode_seconds += answer.timings.decode_seconds();
    if (!right) {
      result.wrong.push_back(fmt::format("{} line {}: expected {}, answered {}", set.name,
                                         item.line, json::serialize(item.expected),
                                         json::serialize(json::value(replace_ill_formed(text)))));
    }
  }
  return result;
}

// Rows of BOS + kProseRowTokens tokens, not overlapping; a partial last row is dropped.
Result<std::vector<Request>> prose_requests(const LoadedEngine& loaded, const EvalSet& set,
                                            int64_t limit) {
  auto bos = loaded.tokenizer->bos_id();
  if (!bos) bos = loaded.checkpoint.config().bos_id;
  if (!bos)
    return invalid("{}: perplexity needs a begin-of-sequence token, the model has none", set.path);
  const std::vector<int32_t> ids = loaded.tokenizer->encode(set.prose);
  int64_t rows = static_cast<int64_t>(ids.size()) / kProseRowTokens;
  if (rows == 0) {
    return invalid("{}: {} tokens, a row has {}", set.path, ids.size(), kProseRowTokens);
  }
  if (limit > 0) rows = std::min(rows, limit);
  std::vector<Request> requests(static_cast<size_t>(rows));
  for (int64_t row = 0; row < rows; ++row) {
    Request& request = requests[static_cast<size_t>(row)];
    request.prompt_ids.push_back(*bos);
    const auto first = ids.begin() + row * kProseRowTokens;
    request.prompt_ids.insert(request.prompt_ids.end(), first, first + kProseRowTokens);
    request.sampling.temperature = 0;
    request.sampling.max_tokens = 1;
    request.sampling.prompt_logprobs = 0;
  }
  return requests;
}

int64_t count_characters(std::string_view text) {
  int64_t count = 0;
  for (size_t at = 0; at < text.size(); ++count) at += decode_utf8(text, at).length;
  return count;
}

Result<EvalResult> run_prose(const LoadedEngine& loaded, const EvalSet& set, int64_t limit,
                             bool show_progress) {
  FATHOM_TRY(const std::vector<Request> requests, prose_requests(loaded, set, limit));
  BatchRun run;
  {
    Progress progress(set.name, show_progress ? static_cast<int64_t>(requests.size()) : 0,
                      Progress::Unit::kItems);
    auto ran = run_batch(*loaded.engine, requests, 0, [&](size_t) { progress.add(1); });
    if (!ran) return with_context(set.path + ": ", ran.error());
    run = std::move(*ran);
  }
  EvalPerplexity perplexity;
  double sum = 0;
  int64_t characters = 0;
  for (size_t row = 0; row < requests.size(); ++row) {
    for (const auto& token : run.answers[row].answer.prompt_logprobs) {
      if (!token) continue;  // BOS has no log-probability
      sum -= token->logprob;
      ++perplexity.tokens;
    }
    characters +=
        count_characters(loaded.tokenizer->decode(std::span(requests[row].prompt_ids).subspan(1)));
  }
  FATHOM_CHECK(perplexity.tokens == static_cast<int64_t>(requests.size()) * kProseRowTokens,
               "{} log-probabilities for {} rows", perplexity.tokens, requests.size());
  perplexity.nll = sum / static_cast<double>(perplexity.tokens);
  perplexity.bits_per_character = sum / std::numbers::ln2 / static_cast<double>(characters);
  EvalResult result;
  result.name = set.name;
  result.seconds = run.seconds();
  result.perplexity = perplexity;
  return result;
}

}  // namespace

Result<EvalResult> run_eval(const LoadedEngine& loaded, const EvalSet& set, int64_t limit,
                            bool show_progress) {
  return set.is_prose() ? run_prose(loaded, set, limit, show_progress)
                        : run_items(loaded, set, show_progress);
}

}  // namespace fathom
