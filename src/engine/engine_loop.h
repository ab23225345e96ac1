// The engine's thread: schedule, run, postprocess, until stopped.
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

  void take_news();
  void add_request(std::unique_ptr<ActiveRequest>& request);
  void enqueue(ActiveRequest& request);
  void expire();
  void step();
  bool plan();
  Result<ConstTensorView> run_model();
  void note_started();
  void note_shape();
  void leave_queue(ActiveRequest& request);
  void abort_request(ActiveRequest& request, const Status& why);
  void end_step(const Status& why);
  void end_early(Sequence& sequence, FinishReason reason, const Status& why);
  void end_sequence(Sequence& sequence, Event& event);
  void emit(Sequence& sequence, Event& event);
  Event& new_event(const Sequence& sequence);
  void publish_stats();
  void check_idle() const;

  const EngineOptions options_;
  std::unique_ptr<Runner> runner_;
  std::unique_ptr<PageStore> store_;
  PagePool pool_;
  PrefixTree tree_;
  Scheduler scheduler_;
  BatchBuilder builder_;
  Postprocess postprocess_;
  StepPlan plan_;
  Event event_;  // filled anew for each emission
  Inbox inbox_;
  Inbox::News news_;
  std::unordered_map<RequestId, std::unique_ptr<ActiveRequest>> requests_;
  std::deque<Deadline> must_start_, must_end_;
  uint64_t arrivals_ = 0;
  bool stopping_ = false;

  EngineStats counters_;
  Time last_step_;
  mutable std::mutex stats_mutex_;  // guards the two below
  EngineStats published_;
  Time published_last_step_;
};

}  // namespace fathom
