#include "cli/batch_run.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>

namespace fathom {
namespace {

using Clock = std::chrono::steady_clock;

// Filled by the engine's thread; the caller's thread waits.
class Collector {
 public:
  Collector(size_t count, const std::function<void(size_t)>& on_finished)
      : on_finished_(on_finished) {
    run_.answers.resize(count);
    ids_.resize(count);
  }

  EventSink sink(size_t index) {
    return [this, index](const Event& event) { take(index, event); };
  }

  void submitted(size_t index, RequestId id, SteadyTime when) {
    const std::lock_guard lock(mutex_);
    ids_[index] = id;
    run_.answers[index].submitted = when;
  }

  // Call before submit(): waits until fewer than `limit` requests are running.
  void enter(int64_t limit) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return limit == 0 || running_ < limit; });
    ++running_;
    run_.peak_concurrency = std::max(run_.peak_concurrency, running_);
  }

  // Call after a submit() that was refused.
  void leave() {
    const std::lock_guard lock(mutex_);
    --running_;
    changed_.notify_all();
  }

  void wait_for_all() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return running_ == 0; });
  }

  bool failed() const {
    const std::lock_guard lock(mutex_);
    return failed_;
  }

  // Call after wait_for_all().
  BatchRun& run() { return run_; }
  const std::vector<RequestId>& ids() const { return ids_; }

 private:
  void take(size_t index, const Event& event) {
    const auto now = Clock::now();
    {
      const std::lock_guard lock(mutex_);
      BatchAnswer& answer = run_.answers[index];
      answer.answer.add(event);
      answer.token_times.insert(answer.token_times.end(), event.ids.size(), now);
      if (!event.last) return;
      if (event.finish == FinishReason::kError) failed_ = true;
    }
    on_finished_(index);
    leave();
  }

  const std::function<void(size_t)>& on_finished_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  BatchRun run_;
  std::vector<RequestId> ids_;
  int64_t running_ = 0;
  bool failed_ = false;
};

}  // namespace

Result<BatchRun> run_batch(Engine& engine, const std::vector<Request>& requests,
                           int64_t max_concurrency,
                           const std::function<void(size_t index)>& on_finished) {
  Collector collector(requests.size(), on_finished);
  collector.run().begin = Clock::now();
  for (size_t i = 0; i < requests.size() && !collector.failed(); ++i) {
    collector.enter(max_concurrency);
    const auto when = Clock::now();
    const auto id = engine.submit(requests[i], collector.sink(i));
    if (!id) {
      collector.leave();
      for (size_t j = 0; j < i; ++j) engine.abort(collector.ids()[j]);
      collector.wait_for_all();  // the sinks refer to the collector
      return with_context(fmt::format("request {}: ", i + 1), id.error());
    }
    collector.submitted(i, *id, when);
  }
  collector.wait_for_all();
  BatchRun run = std::move(collector.run());
  run.end = Clock::now();
  for (size_t i = 0; i < run.answers.size(); ++i) {
    const Answer& answer = run.answers[i].answer;
    if (answer.finish == FinishReason::kError) {
      return with_context(fmt::format("request {}: ", i + 1), answer.error);
    }
  }
  return run;
}

}  // namespace fathom
