// The engine: requests in, events out. It never sees HTTP or JSON.
//
// Owns its thread, the runner, the scheduler and all sequences. submit(), abort(), stats() and
// drain() may be called from any thread; everything else happens on the engine's thread, whose loop
// is: schedule, run, postprocess.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/request.h"
#include "engine/runner.h"

namespace fathom {

class Tokenizer;

struct EngineOptions {
  int64_t max_num_seqs = 256;         // sequences that run together; a choice of n is one
  int64_t max_batched_tokens = 2048;  // rows a step; at least max_num_seqs
  // The work of so many rows without context is what prompts of more than two steps' work take of a
  // step together while there are other sequences; 0: an eighth of max_batched_tokens, with which
  // a 100,000-token prompt at most triples the others' p99 time to the first token
  // (fairness_test.cc). More is sooner for the long and later for the others.
  int64_t long_prompt_rows = 0;
  int64_t max_prompt_logit_rows = 64;  // prompt positions whose logits one step may want
  int64_t max_queued_requests = 512;   // submitted and not yet started; beyond it: refused
  int64_t max_queued_tokens = 0;       // their prompt tokens; 0: four times the cache
  // A request that has not started, or not ended, so long after submit() is aborted; 0: never.
  std::chrono::nanoseconds max_queue_time = std::chrono::seconds(120);
  std::chrono::nanoseconds max_total_time = std::chrono::minutes(30);
  // Pages stay when their sequences have ended, and later requests that begin with the same tokens
  // take them. Without it only choices of one request share pages.
  bool prefix_caching = true;
  // Pages that the pool has no room for go to so much host memory, and below it to files under this
  // directory, of so much together; from there they come back instead of being computed again.
  int64_t kv_offload_bytes = 0;
  std::string kv_offload_dir = {};  // empty: no files
  int64_t kv_offload_disk_bytes = 0;
  std::vector<int32_t> eos_ids = {};  // any of them ends a sequence
  int64_t preempt_every = 0;          // a fault for tests: every so many steps preempt one sequence
  std::function<std::chrono::steady_clock::time_point()> clock =
      {};  // for tests; none: the real one
};

struct EngineStats {
  int64_t running = 0, waiting = 0;  // sequences; waiting includes preempted ones
  int64_t queued_requests = 0, queued_tokens = 0;
  int64_t pages_total = 0, pages_used = 0;
  int64_t pages_cached = 0;  // held by nobody, kept for their text; the rest is free
  int64_t pages_stored = 0;  // in host memory and files
  int64_t steps = 0, prompt_tokens = 0, generated_tokens = 0, preemptions = 0;
  int64_t cached_tokens = 0;                    // of prompts, not computed
  int64_t prefix_queries = 0, prefix_hits = 0;  // prompt tokens looked for in the cache, and found
  int64_t prefix_returns = 0;                   // pages that came back from host memory or files
  int64_t prefix_evictions = 0;                 // pages that left the pool to make room
  int64_t stopped = 0, length = 0, aborted = 0, failed = 0;  // choices, by how they ended
  int64_t rejected = 0;                                      // by a full queue
  int64_t expired = 0;                                       // requests, by a deadline
  double last_step_age_seconds = 0;                          // since the last step ended
  // The step that runs, or the last one: what a step that never ends is known by.
  int64_t step_sequences = 0, step_rows = 0;
  int64_t step_longest = 0;  // tokens, of its longest sequence, this step's included
};

class Engine {
 public:
  // The tokenizer may be null: ids only, no text, and stop strings are refused.
  static Result<std::unique_ptr<Engine>> create(EngineOptions options,
                                                std::unique_ptr<Runner> runner,
                                                std::shared_ptr<const Tokenizer> tokenizer);
  // Aborts what runs (each request gets its last event) and joins the thread.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Checks the request fully, queues it and returns. kInvalidArgument: the request can never run.
  // kResourceExhausted: the queue is full. kUnavailable: draining or stopped. After an error the
  // sink is never called.
  Result<RequestId> submit(Request request, EventSink sink);

  // What submit() would say to any request now, whatever it is: asked before one is made, so that a
  // full queue costs little.
  Result<> has_room();

  // Ends a request at the next step's boundary: its unfinished choices get their last event, with
  // kAbort. Unknown and finished requests are ignored.
  void abort(RequestId request);

  EngineStats stats() const;

  // Forgets every cached prefix that no running sequence holds, at the next step's boundary.
  void flush_prefix_cache();

  // Refuses new requests and waits until all have ended; false if that took longer.
  bool drain(std::chrono::nanoseconds timeout);

  // Refuses new requests, aborts all and joins the thread. Not from a sink.
  void stop();

 private:
  struct Parts;
  explicit Engine(std::unique_ptr<Parts> parts);
  std::unique_ptr<Parts> parts_;
};

}  // namespace fathom
