// Decides what each step runs. No threads, no clock, no model: sequences and pages in, a plan out.
//
// Continuous batching: sequences that need one token first (decode), then prompts in chunks, under
// a budget of rows; new sequences are admitted first come, first served, when their prompt's pages
// are free. Pages are reserved as they are needed. When they run out, the sequence that arrived
// last gives up all of its own and waits to be computed again (preemption by recompute); the oldest
// running sequence is never preempted, so something always advances.
//
// Owns the waiting and running lists, not the sequences. Callers: the engine's thread.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "cache/page_pool.h"
#include "engine/sequence.h"
#include "engine/step_plan.h"

namespace fathom {

struct SchedulerOptions {
  int64_t max_num_seqs = 0;
  int64_t max_batched_tokens = 0;     // >= max_num_seqs
  int64_t max_prompt_logit_rows = 0;  // >= 1
  int64_t preempt_every = 0;          // for tests; 0: only when pages run out
};

class Scheduler {
 public:
  Scheduler(const SchedulerOptions& options, PagePool& pool) : options_(options), pool_(&pool) {}

  // A sequence that fits into the empty cache at its full length. Its arrival is above all others'.
  void add(Sequence& sequence);

  // The next step. Empty only if there is nothing to do.
  void schedule(StepPlan& plan);

  // The step has run: its tokens are in the cache.
  void advance(const StepPlan& plan);

  // Takes a sequence out, whatever its phase, and releases its pages. Once for each.
  void finish(Sequence& sequence);

  bool has_work() const { return !waiting_.empty() || !running_.empty(); }
  int64_t num_waiting() const { return std::ssize(waiting_); }
  int64_t num_running() const { return std::ssize(running_); }
  int64_t num_preemptions() const { return num_preemptions_; }

 private:
  void plan_decode(StepPlan& plan);
  void plan_prefill(StepPlan& plan);
  void admit_waiting(StepPlan& plan);
  bool admit(Sequence& sequence, StepPlan& plan);
  bool plan_chunk(Sequence& sequence, StepPlan& plan);
  int64_t chunk_length(const Sequence& sequence) const;
  int64_t shareable_pages(const Sequence& sequence) const;
  bool reserve(Sequence& sequence, int64_t num_tokens);
  Sequence* latest_unplanned() const;
  void preempt(Sequence& sequence);
  int64_t pages_promised() const;

  const SchedulerOptions options_;
  PagePool* pool_;
  std::deque<Sequence*> waiting_;   // by arrival
  std::vector<Sequence*> running_;  // by arrival
  int64_t budget_ = 0;              // rows left in the step being planned
  int64_t prompt_logit_budget_ = 0;
  int64_t num_steps_ = 0, num_preemptions_ = 0;
  bool preempted_ = false;  // in the step being planned
};

}  // namespace fathom
