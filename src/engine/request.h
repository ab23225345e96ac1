// What goes into the engine and what comes out of it: a request and its events.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "base/status.h"
#include "engine/sampling_params.h"
#include "engine/token_grammar.h"

namespace fathom {

inline constexpr size_t kMaxCacheSaltBytes = 256;  // more than any secret has to have

using RequestId = uint64_t;  // given by Engine::submit, never reused

struct Request {
  std::string id = {};  // the caller's name for it, for log lines; may be empty
  std::vector<int32_t> prompt_ids = {};
  SamplingParams sampling = {};
  // Lower goes sooner, as in vLLM: into the batch, and at the cost of others when pages run out.
  int32_t priority = 0;
  // Requests take each other's computed prefixes only if their salts are equal: a tenant's secret.
  std::string cache_salt = {};
  // What every choice has to match; none: anything. With grammar_begins_after, what comes behind
  // the first token with this id (the end of reasoning) has to, and what comes before is free.
  std::shared_ptr<const TokenGrammar> grammar = {};
  std::optional<int32_t> grammar_begins_after = {};
};

// log-softmax of the raw logits at `id`, and the most likely alternatives in descending order
// (equal ones by ascending id). `id` itself is among them only where it is that likely.
struct TokenLogprob {
  int32_t id = 0;
  float logprob = 0;
  std::vector<std::pair<int32_t, float>> top;
};

enum class FinishReason {
  kStop,    // end of sequence, a stop id, a stop string, or a grammar that allows nothing more
  kLength,  // max_tokens or the end of the context
  kAbort,
  kError,  // Event::error says what
};

// "stop", "length", "abort", "error": as the HTTP interfaces write them.
std::string_view name_of(FinishReason reason);

struct RequestTimings {
  using Time = std::chrono::steady_clock::time_point;
  Time queued;       // submit() was called
  Time started;      // the prompt's first chunk was scheduled; finished, if it never was
  Time first_token;  // of this choice; finished, if there was none
  Time finished;     // of this choice

  double queue_seconds() const { return seconds(queued, started); }
  double ttft_seconds() const { return seconds(queued, first_token); }
  double decode_seconds() const { return seconds(first_token, finished); }
  double total_seconds() const { return seconds(queued, finished); }

 private:
  static double seconds(Time from, Time to) {
    return std::chrono::duration<double>(to - from).count();
  }
};

// Usage of one choice. The prompt of a request with several choices is counted in each of them.
struct Usage {
  int64_t prompt_tokens = 0;
  int64_t completion_tokens = 0;
  int64_t cached_tokens = 0;  // of the prompt, found in the prefix cache instead of computed
  int64_t preemptions = 0;
};

// What has become of one choice since its last event. Every choice's stream ends with exactly one
// event that has `finish`; nothing follows it.
struct Event {
  RequestId request = 0;
  int index = 0;  // which of the n choices

  std::vector<int32_t> ids;  // new tokens; an end-of-sequence or stop id is among them
  // New text, safe to show: whole characters, and never the beginning of what may become a stop
  // string. May lag behind ids. Without a tokenizer always empty.
  std::string text;
  std::vector<TokenLogprob> logprobs;  // one for each of ids, if asked for
  // One for each prompt token (the first has none), in the first event of choice 0.
  std::vector<std::optional<TokenLogprob>> prompt_logprobs;

  std::optional<FinishReason> finish;
  // From here on only with `finish`.
  std::variant<std::monostate, int32_t, std::string>
      matched_stop;  // the id or string that ended it
  Status error;      // of kError and kAbort
  Usage usage;
  RequestTimings timings;
  bool last = false;  // all choices of the request have ended
};

// Called on the engine's thread for each event, in order: must not block, must not throw. It may
// call submit() and abort(); it must not destroy the engine.
using EventSink = std::function<void(const Event&)>;

}  // namespace fathom
