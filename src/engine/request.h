// What goes into the engine and what comes out: requests and their events.
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
#include "engine/page_export.h"
#include "engine/sampling_params.h"
#include "engine/token_grammar.h"
#include "model/forward_batch.h"

namespace fathom {

inline constexpr size_t kMaxCacheSaltBytes = 256;  // bytes

using RequestId = uint64_t;  // assigned by Engine::submit, never reused

struct Request {
  std::string id = {};  // the caller's name for log lines; may be empty
  std::vector<int32_t> prompt_ids = {};
  SamplingParams sampling = {};
  // Lower goes first, as in vLLM: in admission, and when preemption chooses who gives up pages.
  int32_t priority = 0;
  // Drafts of a choice in a step, 0 to kMaxDrafts; not set: as many as the engine likes. Changes no
  // token.
  std::optional<int64_t> max_drafts = {};
  // The lane to run in, from 0; not set: the engine chooses.
  std::optional<int> lane = {};
  // Requests share cached prefixes only if their salts are equal. A tenant's secret.
  std::string cache_salt = {};
  // The engine that has the prompt's rows already, of those that compute prompts for this one: its
  // id or its address. Empty, or one that is not there: any.
  std::string prefill_at = {};
  // The grammar that each choice must match; null: unconstrained. With grammar_begins_after, the
  // grammar applies after the first token with this id (the end of reasoning); the text before it
  // is unconstrained.
  std::shared_ptr<const TokenGrammar> grammar = {};
  std::optional<int32_t> grammar_begins_after = {};
  // Computes the prompt's rows for another engine instead of a completion: its pages go there from
  // `export_from` on, as they are computed. The request then ends with kStop and no token; of
  // `sampling` n is 1 and nothing else counts.
  std::shared_ptr<PageExport> page_export = {};
  int64_t export_from = 0;
};

// Log-softmax of the raw logits at `id`, and the most likely alternatives in descending order (ties
// by ascending id). `top` contains `id` itself only if it is likely enough.
struct TokenLogprob {
  int32_t id = 0;
  float logprob = 0;
  std::vector<std::pair<int32_t, float>> top;
};

enum class FinishReason {
  kStop,    // end of sequence, a stop id, a stop string, or a grammar that allows nothing more
  kLength,  // max_tokens or the end of the context
  kAbort,
  kError,  // see Event::error
};

// "stop", "length", "abort" or "error", as in the HTTP APIs.
std::string_view name_of(FinishReason reason);

struct RequestTimings {
  using Time = std::chrono::steady_clock::time_point;
  Time queued;       // submit() was called
  Time started;      // the prompt's first chunk was scheduled; equals finished if it never was
  Time first_token;  // of this choice; equals finished if there was none
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

// Usage of one choice. A request's prompt is counted in each of its choices.
struct Usage {
  int64_t prompt_tokens = 0;
  int64_t completion_tokens = 0;
  int64_t cached_tokens = 0;  // prompt tokens found in the prefix cache
  int64_t preemptions = 0;
  int64_t draft_tokens = 0;     // drafts that were rows of its steps
  int64_t accepted_tokens = 0;  // and those that became tokens of the completion
};

// The news of one choice since its last event. Each choice's stream ends with exactly one event
// that has `finish`.
struct Event {
  RequestId request = 0;
  int index = 0;  // which of the n choices

  std::vector<int32_t> ids;  // new tokens, including a final end-of-sequence or stop id
  // New text, final: whole characters, and never a prefix of a possible stop string. May lag behind
  // ids. Always empty without a tokenizer.
  std::string text;
  std::vector<TokenLogprob> logprobs;  // one per id, if requested
  // One entry per prompt token (empty for the first), in the first event of choice 0.
  std::vector<std::optional<TokenLogprob>> prompt_logprobs;

  std::optional<FinishReason> finish;
  // The fields below are set only with `finish`.
  std::variant<std::monostate, int32_t, std::string>
      matched_stop;  // the stop id or string that ended it
  Status error;      // set with kError and kAbort
  Usage usage;
  RequestTimings timings;
  bool last = false;  // all choices of the request have ended
};

// Called on the engine's thread for each event, in order. Must not block or throw. May call
// submit() and abort(); must not destroy the engine.
using EventSink = std::function<void(const Event&)>;

}  // namespace fathom
