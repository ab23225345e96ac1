// Decides what each step runs. No threads, no clock, no model: sequences and pages in, a plan out.
//
// Continuous batching: sequences that need one token first (decode), then prompts in chunks, under
// a budget of rows; new sequences are admitted in order, when their prompt's pages are available.
// The order is that of Sequence::order, which EngineLoop makes of priority and time, then of
// priorities, among equals first come, first served. Pages are reserved as
// they are needed. When they run out, the sequence that is last in order gives up all of its own
// and waits to be computed again (preemption by recompute); the first running sequence is never
// preempted, so something always advances.
//
// Prefixes: a sequence begins with what the prefix tree has of its text. What another sequence is
// computing just then it waits for, until those pages are in the tree or that sequence computes no
// longer; it never waits for one of lower priority, nor for one that does not run.
//
// Fairness: prompts that are more work than kLongPromptSteps full steps take together the work of
// long_prompt_rows of a step while there are shorter sequences, or were a few steps ago, so that
// these neither wait behind them nor have to take part in long steps; among others of their kind
// they take so many rows. Work is counted in rows without context: keys_worth_a_row keys of context
// make a row twice the work. A long prompt that waits for pages lets others pass, as often as
// max_num_seqs.
//
// Steps in flight: a sequence's rows count as computed when the step has begun, since whatever
// reads them comes later on the device; its pages go into the tree when all their tokens are known.
//
// Copies: pages that come back from the store take their time. A sequence that waits for its own
// runs in name, so that others are preempted for it and it for others, but takes part in no step.
// Pages that are given up are not free before they have been saved: who needs one meanwhile sits
// out a step, and nobody is preempted for that.
//
// Memory: what may find none comes before what it changes, or is undone by finish(). So after
// add(), schedule() or advance() has thrown std::bad_alloc the lists and pages are as good as
// before.
//
// Owns the waiting and running lists, not the sequences. Callers: the engine's thread.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "cache/prefix_tree.h"
#include "engine/pending_pages.h"
#include "engine/sequence.h"
#include "engine/step_plan.h"

namespace fathom {

// What a step or two can do is not worth a second queue.
inline constexpr int64_t kLongPromptSteps = 2;
// Who sends small requests sends the next one soon: a step that begins in between must not be long.
inline constexpr int64_t kCompanySteps = 64;

// Of the pool, at most one in so many pages is made free before it is wanted.
inline constexpr int64_t kPoolShareAhead = 8;

struct SchedulerOptions {
  int64_t max_num_seqs = 0;
  int64_t max_batched_tokens = 0;     // >= max_num_seqs
  int64_t max_prompt_logit_rows = 0;  // >= 1
  int64_t long_prompt_rows = 0;       // >= 1: a step's work for long prompts among others
  int64_t keys_worth_a_row = 0;       // 0: context is no work
  bool share_answers = true;          // pages of answers too, not only those of prompts
  int64_t preempt_every = 0;          // for tests; 0: only when pages run out
};

class Scheduler {
 public:
  Scheduler(const SchedulerOptions& options, PrefixTree& tree);

  // A sequence that fits into the empty cache at its full length; priority, arrival and prefix are
  // set. No two have the same arrival.
  void add(Sequence& sequence);

  // The next step. Empty only if there is nothing to do before a step or copy in flight has ended.
  // After std::bad_alloc there is no plan, but plan.started holds what has started; another call
  // plans anew.
  void schedule(StepPlan& plan);

  // Every running sequence gives up its pages and waits, because what they hold may be wrong. After
  // std::bad_alloc some still run.
  void preempt_all();

  // What schedule() or preempt_all() was about when it threw.
  Sequence& planning() const { return *planning_; }

  // The step has begun: its tokens are in the cache, and their full pages for others to take.
  void advance(const StepPlan& plan);

  // A token of the sequence, in whatever phase, has become known: the page that it ends, too.
  void commit_token(Sequence& sequence);

  // Takes a sequence out, whatever its phase, and releases its pages. Once for each.
  void finish(Sequence& sequence);

  bool has_work() const { return !waiting_.empty() || !running_.empty(); }
  int64_t num_waiting() const { return std::ssize(waiting_); }
  int64_t num_running() const { return std::ssize(running_); }
  int64_t num_preemptions() const { return num_preemptions_; }

 private:
  void plan_decode(StepPlan& plan);
  bool is_long(const Sequence& sequence, int64_t cached_tokens) const;
  double prefill_cost(int64_t context) const;
  bool has_short_sequences() const;
  int64_t rows_for_long_prompts() const;
  void plan_short_prompts(StepPlan& plan);
  void plan_long_prompts(StepPlan& plan);
  void admit_waiting(StepPlan& plan);
  bool is_computed_elsewhere(Sequence& sequence);
  PrefixTree::Found find_prefix(Sequence& sequence) const;
  int64_t shareable_len(const Sequence& sequence) const;
  int64_t reusable_pages(const Sequence& sequence) const;
  bool admit(Sequence& sequence, PrefixTree::Found found);
  void start(Sequence& sequence, StepPlan& plan);
  void begin_computing(Sequence& sequence, StepPlan& plan);
  void go_on_loading(StepPlan& plan);
  bool has_loaded(Sequence& sequence);
  bool plan_chunk(Sequence& sequence, StepPlan& plan);
  int64_t chunk_length(const Sequence& sequence) const;
  PrefixTree::Room reserve(Sequence& sequence, int64_t num_tokens);
  Sequence* last_unplanned() const;
  void preempt(Sequence& sequence);
  void release_pages(Sequence& sequence);
  void publish(Sequence& sequence);
  int64_t pages_promised() const;

  const SchedulerOptions options_;
  PrefixTree* tree_;
  PendingPages pending_;
  std::deque<Sequence*> waiting_;   // in order
  std::vector<Sequence*> running_;  // in order
  std::vector<Sequence*> passed_;   // long prompts that lack pages, in the step being planned
  Sequence* planning_ = nullptr;
  int64_t budget_ = 0;  // rows left in the step being planned
  int64_t prompt_logit_budget_ = 0;
  int64_t num_steps_ = 0, num_preemptions_ = 0;
  int64_t last_company_ = -kCompanySteps;  // the last step with sequences that are not long
  bool preempted_ = false;                 // in the step being planned
};

}  // namespace fathom
