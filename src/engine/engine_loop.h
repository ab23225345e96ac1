// The engine's thread: schedule, begin a step, postprocess a finished one, until stopped.
//
// If the runner allows two steps in flight, the next step begins before the tokens of the last one
// are known. A sequence that turns out to have ended then takes part in one step too many, and its
// row is discarded.
//
// Owns the runner, the pages and all requests. Only inbox(), stats() and now() may be called from
// other threads.
//
// Out of memory (std::bad_alloc) ends only the work that needed the allocation, with an error: the
// request being added, the sequence being planned or given its token, or all sequences of a step.
// Ending a sequence needs no allocation.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "engine/batch_builder.h"
#include "engine/engine.h"
#include "engine/inbox.h"
#include "engine/lanes.h"
#include "engine/page_exports.h"
#include "engine/postprocess.h"

namespace fathom {

class EngineLoop {
 public:
  // A store for each lane of the runner, which may be null.
  EngineLoop(const EngineOptions& options, std::unique_ptr<Runner> runner,
             std::vector<std::unique_ptr<PageStore>> stores);

  ~EngineLoop();
  EngineLoop(const EngineLoop&) = delete;
  EngineLoop& operator=(const EngineLoop&) = delete;

  // The thread's body. Returns after inbox().stop(), when all requests have ended.
  void run();

  Inbox& inbox() { return inbox_; }
  const Inbox& inbox() const { return inbox_; }
  EngineStats stats() const;
  EngineProgress progress() const;
  RequestTimings::Time now() const { return options_.clock(); }  // any thread

 private:
  using Time = RequestTimings::Time;

  // A request's deadline to start, or to end. Deadlines of one kind are in the order of their
  // times.
  struct Deadline {
    Time at;
    RequestId request = 0;
  };

  void drain_inbox();
  void add_request(std::unique_ptr<ActiveRequest>& request);
  void enqueue(ActiveRequest& request);
  int64_t order_of(const Sequence& sequence) const;
  void expire();
  void take_pieces();
  void send_pages();
  void export_rows(const StepEntry& entry);
  void wait_for_peer();
  bool may_begin() const;
  void limit_overlap(const StepPlan& plan);
  bool begin_step();
  bool plan(StepPlan& plan);
  Result<> begin(Step& step);
  Result<> propose_drafts(Step& step);
  void end_step();
  void apply_sampled_tokens(Step& step, std::span<const SampledToken> sampled);
  void deliver_tokens(const StepEntry& entry, StepResults& results);
  void count_drafts(const StepEntry& entry, int64_t accepted);
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
  bool is_idle() const { return !lanes_.has_work() && steps_in_flight() == 0; }
  Step& step(int64_t number) { return steps_[static_cast<size_t>(number) % steps_.size()]; }
  void check_idle() const;

  const EngineOptions options_;
  std::unique_ptr<Runner> runner_;
  Lanes lanes_;
  PageExports exports_;
  BatchBuilder builder_;
  std::vector<Step> steps_;        // one per step in flight, used in turn
  int64_t begun_ = 0, ended_ = 0;  // steps, numbered from 1
  int64_t undrafted_steps_ = 0;    // may begin beside another before drafts are considered again
  Event event_;                    // reused for each emission
  Inbox inbox_;
  Inbox::News news_;
  std::unordered_map<RequestId, std::unique_ptr<ActiveRequest>> requests_;
  // Finished, but steps in flight still refer to them.
  std::unique_ptr<ActiveRequest> ended_requests_;
  std::deque<Deadline> must_start_, must_end_;
  uint64_t arrivals_ = 0;
  bool stopping_ = false;
  std::optional<Status> death_;  // why the engine is dead
  int64_t failed_steps_ = 0;     // consecutive

  EngineStats counters_;
  Time last_step_;
  mutable std::mutex stats_mutex_;  // guards the two below
  EngineStats published_;
  Time published_last_step_;
  std::atomic<int64_t> peer_waits_{0};  // times that nothing could run before another engine does
};

}  // namespace fathom
