// Decides what each step of a lane runs. No threads, no clock, no model: sequences and pages in, a
// plan out.
//
// Continuous batching: each step first takes the sequences that need one token (decode), then
// prompts in chunks, within a budget of rows. New sequences are admitted in order, when pages for
// their prompt are available. The order is by Sequence::order, which EngineLoop derives from
// priority and time, then by priority, then first come, first served. Pages are reserved as they
// are needed. When they run out, the last sequence in order gives up its pages and waits to be
// computed again (preemption by recompute). The first running sequence is never preempted, so
// something always advances.
//
// Prefixes: a sequence begins with the pages that the prefix tree has of its text. If another
// running sequence is computing its next page, it waits until that page is in the tree or the other
// sequence stops. It never waits for a sequence of lower priority, nor for one that does not run.
//
// Fairness: a prompt that takes more work than kLongPromptSteps full steps is long. While there are
// shorter sequences, or were in the last kCompanySteps steps, long prompts together get the work of
// long_prompt_rows per step, so that the others neither wait behind them nor take part in long
// steps. Work is counted in rows without context: keys_worth_a_row keys of context double a row's
// work. Among long prompts only, long_prompt_rows is a number of rows, whatever their context. A
// long prompt that waits for pages lets other sequences pass, up to max_num_seqs times.
//
// Drafts: a sequence that decodes may get rows behind its newest token, of tokens that may follow.
// They take what decode leaves of the budget and of the free pages; nothing is preempted for them.
// Their cache rows count as computed when they have turned out to be tokens; a row that was written
// for any other is beyond `computed`, where nothing reads it before it is written again, and where
// no page is published.
//
// Steps in flight: a sequence's rows count as computed once the step has begun, since whatever
// reads them runs later on the device. Pages go into the tree when all their tokens are known.
//
// Remote prefill: the rows of a sequence's prompt may be computed by another engine. It takes the
// pages that the tree has, reserves pages for all its tokens, orders the rest, and counts as
// running meanwhile: it can preempt and be preempted, but takes part in no step. When all rows but
// its last token's have come it decodes. Its pages are published then.
//
// Copies: loading pages from the store is asynchronous. A sequence whose pages are loading counts
// as running, so it can preempt and be preempted, but takes part in no step. Pages being evicted
// are free only when they have been saved; a sequence that needs one in the meantime skips a step,
// and nothing is preempted for it.
//
// Out of memory: what may throw comes before the state that it changes, or is undone by finish().
// After add(), schedule() or advance() has thrown std::bad_alloc, the lists and pages are
// consistent.
//
// Owns the waiting and running lists, not the sequences. Engine thread only.
#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "cache/prefix_tree.h"
#include "engine/draft_policy.h"
#include "engine/pending_pages.h"
#include "engine/remote_prefill.h"
#include "engine/sequence.h"
#include "engine/step_plan.h"

namespace fathom {

// Full steps of work beyond which a prompt is long. Shorter ones do not need a separate queue.
inline constexpr int64_t kLongPromptSteps = 2;
// A client of short requests tends to send the next one soon, so long prompts stay limited for this
// many steps after the last short sequence.
inline constexpr int64_t kCompanySteps = 64;

// At most 1/kPoolShareAhead of the pool's pages are freed ahead of use.
inline constexpr int64_t kPoolShareAhead = 8;

struct SchedulerOptions {
  int64_t max_num_seqs = 0;
  int64_t max_batched_tokens = 0;     // rows per step; >= max_num_seqs
  int64_t max_prompt_logit_rows = 0;  // >= 1
  int64_t long_prompt_rows = 0;       // >= 1: work per step for long prompts while there are others
  int64_t keys_worth_a_row = 0;       // 0: the cost of context is not counted
  int64_t max_drafts = 0;             // of a sequence in a step
  DraftPolicy* draft_policy = nullptr;  // null: always as many as there is room for
  bool share_answers = true;            // also share pages of completions, not only of prompts
  int64_t preempt_every = 0;  // for tests: preempt one sequence every so many steps; 0: off
};

// Brings pages of a text that other lanes have in their pools into this lane's prefix tree.
class PrefixSource {
 public:
  virtual ~PrefixSource() = default;
  // Up to the text's first `max_pages` pages, for a sequence that is about to be admitted. Brings
  // nothing if there is no room for it.
  virtual void bring_prefix(const Sequence& sequence, int64_t max_pages) = 0;
};

class Scheduler {
 public:
  // `source` and `remote` may be null.
  Scheduler(const SchedulerOptions& options, PrefixTree& tree, PrefixSource* source = nullptr,
            RemotePrefill* remote = nullptr);

  // Adds a sequence that fits into the empty cache at its full length. Its priority, arrival and
  // prefix are set; arrivals are unique.
  void add(Sequence& sequence);

  // Plans the next step, after the plan's other entries. Nothing is added only if nothing can run
  // before a step or copy in flight has ended. Without prompts only decode is planned. After
  // std::bad_alloc there is no plan, but plan.started holds the sequences that have started; the
  // next call plans again.
  void schedule(StepPlan& plan, bool with_prompts = true, bool with_drafts = true);

  // Preempts all running sequences, because their pages may hold wrong rows. After std::bad_alloc
  // some still run.
  void preempt_all();

  // The sequence that schedule() or preempt_all() was working on when it threw; null: none, it may
  // be called again.
  Sequence* planning() const { return planning_; }

  // The step with these entries has begun: their tokens count as computed, and their full pages go
  // into the prefix tree.
  void advance(std::span<const StepEntry> entries);

  // Tokens of the sequence have become known, in whatever phase it is: `accepted` of the step's
  // drafts and the one behind them. The rows of those drafts count as computed. Publishes the pages
  // that the tokens complete.
  void commit_tokens(Sequence& sequence, int64_t accepted = 0);

  // The rows of an arriving sequence have come, all but its last token's; its order has ended. The
  // other side had `cached_tokens` of its text in its cache. Returns how many of the prompt's that
  // adds to what the sequence found here; 0 after a preemption.
  int64_t arrive(Sequence& sequence, int64_t cached_tokens);
  // The order of an arriving sequence has failed: it computes its rows itself. Without this call
  // the next schedule() orders them again.
  void prefill_here(Sequence& sequence);

  // Removes a sequence in any phase and releases its pages. Called once per sequence.
  void finish(Sequence& sequence);

  // The first sequence in order that waits, unless it waits for pages that another sequence of this
  // lane is computing; null: none.
  Sequence* first_waiting() const;
  // Whether there is room to start the sequence, whatever pages of its text are in the tree.
  bool would_admit(const Sequence& sequence) const;
  // Whether the next schedule() has room for first_waiting(), with the pages of its text.
  bool would_admit_first() const;
  // Whether a sequence of another lane would be the first to be admitted here, and has room.
  bool has_room_for(const Sequence& sequence) const {
    return waiting_.empty() && would_admit(sequence);
  }
  // Removes a waiting sequence, which goes to another lane. It keeps its tokens.
  void withdraw(Sequence& sequence);

  bool has_work() const { return !waiting_.empty() || !running_.empty(); }
  // Whether a sequence waits or has more than its newest token to compute.
  bool has_prompts() const;
  // Whether a running sequence needs one token.
  bool has_decode() const;
  int64_t num_waiting() const { return std::ssize(waiting_); }
  int64_t num_running() const { return std::ssize(running_); }
  int64_t num_preemptions() const { return num_preemptions_; }

 private:
  void plan_decode(StepPlan& plan);
  void plan_drafts(std::span<StepEntry> entries);
  int64_t most_drafts(const StepEntry& entry) const;
  int64_t reserve_drafts(Sequence& sequence, int64_t drafts);
  bool is_long(const Sequence& sequence, int64_t cached_tokens) const;
  double prefill_cost(int64_t context) const;
  bool has_short_sequences() const;
  int64_t rows_for_long_prompts() const;
  void plan_prompts(StepPlan& plan);
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
  void order_prompts();
  bool reserve_all(Sequence& sequence);
  bool plan_chunk(Sequence& sequence, StepPlan& plan);
  int64_t chunk_length(const Sequence& sequence) const;
  PrefixTree::Room reserve(Sequence& sequence, int64_t num_tokens);
  Sequence* last_unplanned() const;
  void preempt(Sequence& sequence);
  void release_pages(Sequence& sequence);
  void publish(Sequence& sequence);
  static int64_t pages_to_start(const Sequence& sequence);
  int64_t pages_promised() const;

  const SchedulerOptions options_;
  PrefixTree* tree_;
  PrefixSource* source_;
  RemotePrefill* remote_;
  PendingPages pending_;
  std::deque<Sequence*> waiting_;   // in order
  std::vector<Sequence*> running_;  // in order
  std::vector<Sequence*> passed_;   // long prompts that lack pages, in the step being planned
  Sequence* planning_ = nullptr;
  int64_t budget_ = 0;        // rows left in the step being planned
  int64_t draft_budget_ = 0;  // rows left in the MTP layer's step before it
  int64_t prompt_logit_budget_ = 0;
  int64_t num_steps_ = 0, num_preemptions_ = 0;
  int64_t last_company_ = -kCompanySteps;  // the last step with sequences that are not long
  bool preempted_ = false;                 // in the step being planned
};

}  // namespace fathom
