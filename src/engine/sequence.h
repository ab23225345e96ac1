// One choice of a request while the engine holds it: its tokens, its pages, and the state that
// turns logits into events. Engine thread only.
//
// The scheduler owns the scheduling fields (phase to prompt_logits_end); postprocess owns the
// others. A token is "computed" when its row is in the cache. The newest token never is, so a
// sequence always has something to run.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cache/prefix_tree.h"
#include "engine/request.h"
#include "engine/stop_filter.h"
#include "model/forward_batch.h"
#include "ops/sampling/sample.h"
#include "tokenizer/detokenizer.h"

namespace fathom {

struct ActiveRequest;

struct Sequence {
  enum class Phase { kNew, kWaiting, kRunning, kFinished };  // kNew: not in the scheduler yet

  ActiveRequest* request = nullptr;
  int index = 0;         // which of the n choices
  int64_t order = 0;     // lower goes first; derived from priority and time, see priority_ageing
  int32_t priority = 0;  // breaks ties of order; lower goes first
  // Breaks the remaining ties: first come, first served; the latest is preempted first.
  uint64_t arrival = 0;
  int64_t prompt_len = 0;
  int64_t max_len = 0;          // prompt_len + max_tokens, resolved against the context
  std::vector<int32_t> tokens;  // prompt and output
  // The number of trailing tokens that steps in flight are still sampling. Their ids are negative,
  // see ForwardBatch.
  int64_t num_unknown = 0;

  // Scheduling.
  Phase phase = Phase::kNew;
  int lane = 0;                // whose scheduler and pages it has
  bool stays_in_lane = false;  // the request asked for its lane
  int64_t computed = 0;        // tokens whose rows are in the cache
  // Tokens whose rows are also in the MTP layer's cache. It lags behind by the drafts that the last
  // step has turned into tokens.
  int64_t mtp_len = 0;
  int64_t max_drafts = 0;  // of a step; the request may want fewer than the engine
  // By position in the window, of the drafts behind right ones: the share that was right, see
  // DraftPolicy. Negative: none yet.
  std::array<double, kMaxDrafts> draft_acceptance = {-1, -1, -1};
  std::vector<int32_t> pages;         // block table, in order; the first pages may be shared
  int64_t planned_step = 0;           // the last step that it was part of
  std::optional<PrefixChain> prefix;  // none: its pages are not shared
  int64_t pages_in_tree = 0;          // its first pages, which are published in the prefix tree
  bool is_loading = false;            // its pages are loading from the store; it only holds them
  int64_t pages_to_load = 0;          // the number of pages it will have when loading has ended
  bool is_arriving = false;           // its rows come from another engine; it only holds its pages
  uint64_t ticket = 0;                // the number of its order there; 0: none
  int64_t prefill_attempts = 0;       // orders that have failed
  bool prefills_here = false;         // none of its rows come from elsewhere
  bool is_prompt_only = false;        // computes rows for another engine and samples nothing
  int64_t final_rows = 0;             // with it: rows whose steps have ended
  int64_t pages_sent = 0;             // with it: the next page to send
  std::optional<PageKey> awaited;     // waits until another sequence has computed this page
  bool is_long = false;               // takes several steps' rows: others may pass it
  int64_t times_passed = 0;           // while it waited for pages
  int64_t prompt_logits_done = 0;     // prompt positions whose logits are done
  int64_t prompt_logits_end = 0;  // end of the prompt positions whose logits are wanted; 0: none

  // Sampling.
  SampleOptions sample_options;
  std::unique_ptr<TokenHistory> history;  // only with penalties
  std::vector<int32_t> stop_ids;  // the request's own, then end-of-sequence ids unless ignored
  int64_t num_own_stop_ids = 0;
  std::unique_ptr<TokenGrammarState> grammar;  // null: unconstrained
  bool grammar_ended = false;                  // the text is complete and nothing may follow it
  bool grammar_stuck = false;                  // the text is incomplete and nothing may follow it
  int num_logprobs = -1;
  std::vector<int32_t> drafts;  // tokens that may follow, of the step in flight
  // What `history` is after each of the drafts; only with penalties.
  std::vector<TokenHistory> draft_histories;

  // Text output; unset without a tokenizer.
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
  // Rows of the MTP layer up to the newest token's, which is drafted from.
  int64_t num_mtp_rows() const { return computed + 1 - mtp_len; }
  // At least 1, except of a sequence that is_prompt_only and is about to end.
  int64_t remaining() const { return len() - computed; }
  // Whether it only holds its pages, until its rows have come.
  bool awaits_rows() const { return is_loading || is_arriving; }
  // Whether the sequence may take part in the next step. While its newest token is being sampled it
  // may, unless that is its last token or the next one depends on it (grammar, penalties). One that
  // samples nothing may be computed completely.
  bool may_run() const {
    return !awaits_rows() && remaining() > 0 &&
           (num_unknown == 0 || (len() < max_len && !grammar && !history));
  }
};

// A request that the engine holds, with all its choices. Destroyed when the last choice has ended.
struct ActiveRequest {
  RequestId id = 0;
  Request request;
  EventSink sink;
  std::vector<std::unique_ptr<Sequence>> sequences;
  int unfinished = 0;
  bool counted_as_queued = true;              // until its first sequence is scheduled
  int64_t last_step = 0;                      // the last step that one of its sequences was part of
  std::unique_ptr<ActiveRequest> next_ended;  // links EngineLoop's list of finished requests
};

}  // namespace fathom
