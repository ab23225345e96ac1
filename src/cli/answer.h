// The completion of one choice of a request, assembled from its events.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "engine/engine.h"

namespace fathom {

struct Answer {
  std::vector<int32_t> ids;
  std::string text;
  std::vector<TokenLogprob> logprobs;
  std::vector<std::optional<TokenLogprob>> prompt_logprobs;
  std::optional<FinishReason> finish;
  Status error;  // set with kError and kAbort
  Usage usage;
  RequestTimings timings;

  void add(const Event& event);

  // Speed after the first token; 0 for a completion of one token.
  double decode_tokens_per_second() const;
};

// Runs a request to its end and calls on_event for each of its events, on this thread. Ctrl-C (see
// InterruptWatch) aborts the request, whose final events still arrive. Returns one Answer per
// choice.
Result<std::vector<Answer>> generate(Engine& engine, Request request,
                                     const std::function<void(const Event&)>& on_event);

// The object that `fathom run --json` prints:
//   {"prompt_ids", "ids", "text", "logprobs": [{"id", "logprob", "top": [{"id", "logprob"}…]}…],
//    "prompt_logprobs": [null, …], "finish_reason", "usage": {…}, "timings": {…}}
// logprobs and prompt_logprobs are null if not requested. With several choices these are the first
// one's fields, and all choices are under "choices".
json::object answers_json(const std::vector<int32_t>& prompt_ids,
                          const std::vector<Answer>& answers, const SamplingParams& sampling);

}  // namespace fathom
