// The lanes of an engine: attention groups with pages, a prefix tree and a scheduler each, which
// step together. Decides what concerns more than one of them; with a single lane it adds nothing.
//
// Choice: a request goes to the lane that has the least work for it: its sequences, and the rows of
// the prompt that it would have to compute or to copy. All choices of a request go together.
// Balance: a sequence that waits in a lane without room goes to one that would admit it now. A
// sequence that was preempted moves in the same way, and finds its pages by a copy.
// Copies: a sequence that is about to be admitted gets the pages of its text that another lane has
// in its pool, by a copy between the caches instead of computing them again.
// Alignment: all lanes wait for the slowest, so prompts are admitted in the same steps. After a
// step with prompts in some lanes comes one with decode alone, unless every lane has prompts, none
// has decode, or prompts are left over.
//
// Engine thread only. Out of memory: as the scheduler.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "cache/page_pool.h"
#include "cache/prefix_tree.h"
#include "engine/engine.h"
#include "engine/prefill_orders.h"
#include "engine/scheduler.h"

namespace fathom {

class Lanes {
 public:
  // One lane of the runner a store; a store may be null.
  Lanes(const EngineOptions& options, Runner& runner,
        std::vector<std::unique_ptr<PageStore>> stores);

  // A chain for a sequence's prefix, valid in all lanes.
  PrefixChain chain(uint64_t scope, std::string_view salt) const;
  // Chooses the lane of a new request. `wanted` is the client's choice, -1: none.
  void choose_lane(std::span<const std::unique_ptr<Sequence>> choices, int wanted);
  void add(Sequence& sequence) { of(sequence).scheduler.add(sequence); }

  DraftPolicy& draft_policy() { return draft_policy_; }

  // As Scheduler's, over all lanes.
  void schedule(StepPlan& plan, bool with_drafts);
  void advance(const StepPlan& plan);
  void preempt_all();
  Sequence* planning() const { return planning_; }
  void commit_tokens(Sequence& sequence, int64_t accepted) {
    of(sequence).scheduler.commit_tokens(sequence, accepted);
  }
  void finish(Sequence& sequence) { of(sequence).scheduler.finish(sequence); }
  bool has_work() const;
  int64_t num_running() const;
  // There is no work: roles are the lanes' own again.
  void rest();

  // Takes rows that another engine has computed. Returns the sequences that cannot go on, because
  // their prompts are computed nowhere, and why. Valid until the next call.
  struct Stranded {
    Sequence* sequence = nullptr;
    Status why;
  };
  const std::vector<Stranded>& take_pieces();
  // Whether sequences wait for such rows.
  bool awaits_pieces() const { return orders_ != nullptr && !orders_->empty(); }

  // As PrefixTree's, over all lanes.
  void take_ended(bool wait);
  int64_t copies_in_flight() const;
  void clear_cache();

  // Sets what the lanes know of the statistics. Allocates in the first call only.
  void publish(EngineStats& stats) const;
  // For an idle engine.
  void check_idle() const;

 private:
  struct Lane : PrefixSource {
    Lane(Lanes& all, int number, const EngineOptions& options, const Runner& runner,
         std::unique_ptr<PageStore> page_store, const PrefixHasher& hasher);
    void bring_prefix(const Sequence& sequence, int64_t max_pages) override {
      lanes.bring_prefix(*this, sequence, max_pages);
    }
    int64_t load() const { return scheduler.num_running() + scheduler.num_waiting(); }

    Lanes& lanes;
    const int number;
    std::unique_ptr<PageStore> store;
    PagePool pool;
    PrefixTree tree;
    Scheduler scheduler;
  };

  Lane& of(const Sequence& sequence) { return lanes_[static_cast<size_t>(sequence.lane)]; }
  double work_of(const Lane& lane, const Sequence& sequence, int64_t most_pages) const;
  void balance();
  Lane* roomiest_for(const Sequence& sequence);
  bool prompts_may_run() const;
  void update_roles();
  void bring_prefix(Lane& to, const Sequence& sequence, int64_t max_pages);
  void copy_pages(const Lane& from, Lane& to, const Sequence& sequence, int64_t first_page);

  const EngineOptions& options_;
  Runner& runner_;
  const PrefixHasher hasher_;
  DraftPolicy draft_policy_;
  std::unique_ptr<PrefillOrders> orders_;  // null: the engine computes its prompts itself
  std::deque<Lane> lanes_;
  Sequence* planning_ = nullptr;
  bool had_prompts_ = false;   // the last step, in some lane
  bool left_prompts_ = false;  // it has not taken all of them
  int64_t num_moves_ = 0, num_pages_copied_ = 0;
  int64_t num_prefilled_here_ = 0, num_stranded_ = 0, num_cached_there_ = 0;
  std::vector<Stranded> stranded_;
  std::vector<int32_t> sources_, targets_;  // of bring_prefix()
};

}  // namespace fathom
