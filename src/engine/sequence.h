// One choice of a request while it lives in the engine: its tokens, its pages, and what it needs to
// turn logits into events. Engine thread only.
//
// The scheduler owns the scheduling part (phase, computed, pages); postprocess owns the rest. A
// token is "computed" when its row is in the cache; the newest token never is, so a sequence always
// has something to run.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/request.h"
#include "engine/stop_filter.h"
#include "ops/sampling/sample.h"
#include "tokenizer/detokenizer.h"

namespace fathom {

struct ActiveRequest;

struct Sequence {
  enum class Phase { kWaiting, kRunning, kFinished };

  ActiveRequest* request = nullptr;
  int index = 0;         // which of the n choices
  uint64_t arrival = 0;  // first come, first served; the latest is preempted first
  int64_t prompt_len = 0;
  int64_t max_len = 0;          // prompt_len + max_tokens, resolved against the context
  std::vector<int32_t> tokens;  // prompt and output

  // Scheduling.
  Phase phase = Phase::kWaiting;
  int64_t computed = 0;                   // tokens whose rows are in the cache
  std::vector<int32_t> pages;             // their pages, in order; the first may be shared
  int64_t planned_step = 0;               // the last step that it was part of
  const Sequence* fork_source = nullptr;  // the choice whose full prompt pages may be shared
  int64_t prompt_logits_done = 0;  // prompt positions whose logits need not be computed (again)
  int64_t prompt_logits_end = 0;   // and where those that are wanted end; 0: none are

  // Sampling.
  SampleOptions sample_options;
  std::unique_ptr<TokenHistory> history;  // only with penalties
  std::vector<int32_t> stop_ids;          // end of sequence unless ignored, and the request's own
  int num_logprobs = -1;

  // Text; none without a tokenizer.
  std::optional<IncrementalDetokenizer> detokenizer;
  std::optional<StopFilter> stop_filter;

  // For the events.
  std::vector<std::optional<TokenLogprob>> prompt_logprobs;
  RequestTimings timings;
  Usage usage;
  bool has_started = false;  // scheduled at least once

  int64_t len() const { return static_cast<int64_t>(tokens.size()); }
  int64_t output_len() const { return len() - prompt_len; }
  int64_t remaining() const { return len() - computed; }  // >= 1
};

// A request that the engine holds: all its choices, which go together when the last has ended.
struct ActiveRequest {
  RequestId id = 0;
  Request request;
  EventSink sink;
  std::vector<std::unique_ptr<Sequence>> sequences;
  int unfinished = 0;
  bool counted_as_queued = true;  // until its first sequence is scheduled
};

}  // namespace fathom
