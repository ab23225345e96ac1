// The engine: requests in, events out. It never sees HTTP or JSON.
//
// Owns its thread, the runner, the scheduler and all sequences. submit(), abort(), stats() and
// drain() may be called from any thread; everything else happens on the engine's thread, whose loop
// is: schedule, run, postprocess.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/status.h"
#include "engine/request.h"
#include "engine/runner.h"

namespace fathom {

class Tokenizer;

struct EngineOptions {
  int64_t max_num_seqs = 256;          // sequences that run together; a choice of n is one
  int64_t max_batched_tokens = 2048;   // rows a step; at least max_num_seqs
  int64_t max_prompt_logit_rows = 64;  // prompt positions whose logits one step may want
  int64_t max_queued_requests = 512;   // submitted and not yet started; beyond it: refused
  int64_t max_queued_tokens = 0;       // their prompt tokens; 0: four times the cache
  std::vector<int32_t> eos_ids = {};   // any of them ends a sequence
  int64_t preempt_every = 0;  // a fault for tests: every so many steps preempt one sequence
};

struct EngineStats {
  int64_t running = 0, waiting = 0;  // sequences; waiting includes preempted ones
  int64_t queued_requests = 0, queued_tokens = 0;
  int64_t pages_total = 0, pages_used = 0;
  int64_t steps = 0, prompt_tokens = 0, generated_tokens = 0, preemptions = 0;
  int64_t cached_tokens = 0;                                 // of prompts, not computed again
  int64_t stopped = 0, length = 0, aborted = 0, failed = 0;  // choices, by how they ended
  int64_t rejected = 0;                                      // by a full queue
  double last_step_age_seconds = 0;                          // since the last step ended
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

  // Ends a request at the next step's boundary: its unfinished choices get their last event, with
  // kAbort. Unknown and finished requests are ignored.
  void abort(RequestId request);

  EngineStats stats() const;

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
