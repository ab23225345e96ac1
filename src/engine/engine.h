// The engine: requests in, events out. It never sees HTTP or JSON.
//
// Owns its thread, the runner, the scheduler and all sequences. submit(), abort(), stats() and
// drain() may be called from any thread; everything else happens on the engine's thread, whose loop
// is: schedule, run, postprocess.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/request.h"
#include "engine/runner.h"

namespace fathom {

class Tokenizer;

inline constexpr int32_t kMostPriorityLevels = 10;

// Steps in a row that fail with kInternal, with none in between that succeeds, after which the
// engine counts as dead: a device whose errors stay, without the runner knowing that they do.
inline constexpr int64_t kMostFailedSteps = 16;

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
  // A request goes before another of a level below it (a priority larger by 1) that was submitted
  // at most so much earlier: waiting for so long is worth a level. 0: waiting is worth nothing.
  // Beyond kMostPriorityLevels on either side priorities make no more difference, so that nobody
  // goes before one who has waited 2 * kMostPriorityLevels times as long.
  std::chrono::nanoseconds priority_ageing = std::chrono::seconds(5);
  std::vector<int32_t> eos_ids = {};  // any of them ends a sequence
  int64_t preempt_every = 0;          // a fault for tests: every so many steps preempt one sequence
  std::function<std::chrono::steady_clock::time_point()> clock =
      {};  // for tests; none: the real one
};

// Upper bounds, in rows, of the kinds of steps that are counted apart: vLLM's.
inline constexpr int64_t kStepRowBounds[] = {1,   8,    16,   32,   64,   128,  256,
                                             512, 1024, 2048, 4096, 8192, 16384};

struct EngineStats {
  int64_t running = 0, waiting = 0;  // sequences; waiting includes preempted ones
  int64_t queued_requests = 0, queued_tokens = 0;
  int64_t pages_total = 0, pages_used = 0;
  int64_t pages_cached = 0;       // held by nobody, kept for their text
  int64_t pages_in_transfer = 0;  // on their way to or from host memory; the rest is free
  int64_t pages_stored = 0;       // in host memory and files
  int64_t steps = 0, prompt_tokens = 0, generated_tokens = 0, preemptions = 0;
  double step_seconds = 0;  // in which a step ran
  int64_t rows = 0;         // of all steps
  // Steps of at most kStepRowBounds[i] rows and more than the bound before; the last of more.
  std::array<int64_t, std::size(kStepRowBounds) + 1> steps_by_rows{};
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
  // kResourceExhausted: the queue is full. kUnavailable: draining, stopped or dead. After an error
  // the sink is never called.
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

  // Whether the engine is dead: its device is lost, or kMostFailedSteps steps in a row have failed.
  // A dead engine refuses requests and has ended all that it had, both with kUnavailable; it never
  // recovers.
  bool is_dead() const;

  // Waits until the engine is dead; false if that took longer.
  bool wait_until_dead(std::chrono::nanoseconds timeout);

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
