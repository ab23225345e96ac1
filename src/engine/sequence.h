// One choice of a request while it lives in the engine: its tokens, its pages, and what it needs to
// turn logits into events. Engine thread only.
//
// The scheduler owns the scheduling part (phase to prompt_logits_end); postprocess owns the rest. A
// token is "computed" when its row is in the cache; the newest token never is, so a sequence always
// has something to run.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cache/prefix_tree.h"
#include "engine/request.h"
#include "engine/stop_filter.h"
#include "ops/sampling/sample.h"
#include "tokenizer/detokenizer.h"

namespace fathom {

struct ActiveRequest;

struct Sequence {
  enum class Phase { kNew, kWaiting, kRunning, kFinished };  // kNew: not in the scheduler

  ActiveRequest* request = nullptr;
  int index = 0;         // which of the n choices
  int64_t order = 0;     // lower goes sooner: its priority and its time, see priority_ageing
  int32_t priority = 0;  // the same, among equals
  uint64_t arrival = 0;  // among equals first come, first served; the latest is preempted first
  int64_t prompt_len = 0;
  int64_t max_len = 0;          // prompt_len + max_tokens, resolved against the context
  std::vector<int32_t> tokens;  // prompt and output
  // The number of its last tokens, which steps in flight are still choosing: their ids are below 0,
  // see ForwardBatch.
  int64_t num_unknown = 0;

  // Scheduling.
  Phase phase = Phase::kNew;
  int64_t computed = 0;               // tokens whose rows are in the cache
  std::vector<int32_t> pages;         // their pages, in order; the first may be shared
  int64_t planned_step = 0;           // the last step that it was part of
  std::optional<PrefixChain> prefix;  // none: its pages are its own alone
  int64_t pages_in_tree = 0;          // of its pages the first, those that others can take
  bool is_loading = false;         // its pages are still coming from the store: it holds them only
  int64_t pages_to_load = 0;       // and how many they may become
  std::optional<PageKey> awaited;  // a page that another computes: until then it waits
  bool is_long = false;            // it takes several steps' rows: others pass it
  int64_t times_passed = 0;        // while it waited for pages
  int64_t prompt_logits_done = 0;  // prompt positions whose logits need not be computed (again)
  int64_t prompt_logits_end = 0;   // and where those that are wanted end; 0: none are

  // Sampling.
  SampleOptions sample_options;
  std::unique_ptr<TokenHistory> history;  // only with penalties
  std::vector<int32_t> stop_ids;          // the request's own, then end of sequence unless ignored
  int64_t num_own_stop_ids = 0;
  std::unique_ptr<TokenGrammarState> grammar;  // only with one
  bool grammar_ended = false;                  // the answer is whole and nothing may follow it
  bool grammar_stuck = false;                  // it is not whole, and nothing may follow it
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
  int64_t known_len() const { return len() - num_unknown; }
  int64_t output_len() const { return known_len() - prompt_len; }
  int64_t remaining() const { return len() - computed; }  // >= 1
  // While its newest token is being chosen it may take the next step too, unless that is known to
  // be its last, or what may follow depends on it.
  bool may_run() const {
    return !is_loading && (num_unknown == 0 || (len() < max_len && !grammar && !history));
  }
};

// A request that the engine holds: all its choices, which go together when the last has ended.
struct ActiveRequest {
  RequestId id = 0;
  Request request;
  EventSink sink;
  std::vector<std::unique_ptr<Sequence>> sequences;
  int unfinished = 0;
  bool counted_as_queued = true;              // until its first sequence is scheduled
  int64_t last_step = 0;                      // the last step that one of its sequences was part of
  std::unique_ptr<ActiveRequest> next_ended;  // in EngineLoop's list
};

}  // namespace fathom
