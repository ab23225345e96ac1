// The engine's thread: schedule, begin a step, postprocess one that has ended, until stopped. Where
// the runner has room for two steps the next is begun before the last one's tokens are known: a
// sequence that turns out to have ended takes part in one step too many, whose row nobody looks at.
//
// Owns the runner, the pages and all requests. Everything but inbox() and stats() is that thread's
// alone.
//
// Where memory runs out (std::bad_alloc) what it was about ends with an error: a request that is
// being added, the sequence that is being planned or told its token, or all of a step. The rest
// goes on. What ends a sequence needs no memory itself.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "cache/page_pool.h"
#include "cache/prefix_tree.h"
#include "engine/batch_builder.h"
#include "engine/engine.h"
#include "engine/inbox.h"
#include "engine/postprocess.h"
#include "engine/scheduler.h"

namespace fathom {

class EngineLoop {
 public:
  // The store may be null; it moves the runner's pages.
  EngineLoop(const EngineOptions& options, std::unique_ptr<Runner> runner,
             std::unique_ptr<PageStore> store);

  // The thread's body: returns after inbox().stop(), with all requests ended.
  void run();

  Inbox& inbox() { return inbox_; }
  const Inbox& inbox() const { return inbox_; }
  EngineStats stats() const;
  RequestTimings::Time now() const { return options_.clock(); }  // any thread

 private:
  using Time = RequestTimings::Time;

  // When a request must have started, or ended; those of one kind in the order in which they come.
  struct Deadline {
    Time at;
    RequestId request = 0;
  };

  void drain_inbox();
  void add_request(std::unique_ptr<ActiveRequest>& request);
  void enqueue(ActiveRequest& request);
  int64_t order_of(const Sequence& sequence) const;
  void expire();
  bool begin_step();
  bool plan(StepPlan& plan);
  Result<> begin(Step& step);
  void end_step();
  void apply_sampled_tokens(Step& step, std::span<const SampledToken> sampled);
  void deliver_token(const StepEntry& entry, StepResults& results);
  void note_started(const StepPlan& plan);
  void record_step_shape(const StepPlan& plan);
  void count_step(const Step& step);
  void leave_queue(ActiveRequest& request);
  void end_request(ActiveRequest& request, FinishReason reason, const Status& why);
  void fail(const StepPlan& plan, const Status& why);
  void recompute_the_rest();
  void note_failure(const Status& why);
  void die(const Status& why);
  void end_all(FinishReason reason, const Status& why);
  void end_early(Sequence& sequence, FinishReason reason, const Status& why);
  void end_sequence(Sequence& sequence, Event& event);
  void emit(Sequence& sequence, Event& event);
  Event& new_event(const Sequence& sequence);
  void publish_stats();
  void forget(ActiveRequest& request);
  void erase_finished_requests();
  int64_t steps_in_flight() const { return begun_ - ended_; }
  bool is_idle() const { return !scheduler_.has_work() && steps_in_flight() == 0; }
  Step& step(int64_t number) { return steps_[static_cast<size_t>(number) % steps_.size()]; }
  void check_idle() const;

  const EngineOptions options_;
  std::unique_ptr<Runner> runner_;
  std::unique_ptr<PageStore> store_;
  PagePool pool_;
  PrefixTree tree_;
  Scheduler scheduler_;
  BatchBuilder builder_;
  std::vector<Step> steps_;        // as many as the runner has in flight, in turn
  int64_t begun_ = 0, ended_ = 0;  // steps, numbered from 1
  Event event_;                    // filled anew for each emission
  Inbox inbox_;
  Inbox::News news_;
  std::unordered_map<RequestId, std::unique_ptr<ActiveRequest>> requests_;
  std::unique_ptr<ActiveRequest> ended_requests_;  // that steps in flight still refer to
  std::deque<Deadline> must_start_, must_end_;
  uint64_t arrivals_ = 0;
  bool stopping_ = false;
  std::optional<Status> death_;  // why nothing can run any more
  int64_t failed_steps_ = 0;     // in a row

  EngineStats counters_;
  Time last_step_;
  mutable std::mutex stats_mutex_;  // guards the two below
  EngineStats published_;
  Time published_last_step_;
};

}  // namespace fathom
