// Threads that do the same step for different ranks.
//
// The calling thread is the first rank's, always the same one; the others have threads of their
// own, which sleep between two steps.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <thread>
#include <vector>

namespace fathom {

class RankWorkers {
 public:
  explicit RankWorkers(int count) : failures_(static_cast<size_t>(count)) {
    for (int i = 1; i < count; ++i) {
      threads_.emplace_back([this, i] { serve(i); });
    }
  }
  ~RankWorkers() {
    body_ = nullptr;
    begin();
    for (std::thread& thread : threads_) thread.join();
  }
  RankWorkers(const RankWorkers&) = delete;
  RankWorkers& operator=(const RankWorkers&) = delete;

  int size() const { return static_cast<int>(failures_.size()); }

  // Calls body(i) for each rank i, each on its thread; returns when all have returned. The
  // exception that ended rank i is failures()[i] then; `on_failure`(i), if any, is called when it
  // is caught, on that rank's thread, so that the others can be told.
  void run(const std::function<void(int)>& body, const std::function<void(int)>& on_failure = {}) {
    body_ = &body;
    on_failure_ = &on_failure;
    running_.store(static_cast<int>(threads_.size()), std::memory_order_relaxed);
    begin();
    call(0);
    for (int left = running_.load(); left > 0; left = running_.load()) running_.wait(left);
  }

  // Each rank's exception in the last run; null: the rank returned.
  const std::vector<std::exception_ptr>& failures() const { return failures_; }

 private:
  void begin() {
    step_.fetch_add(1);
    step_.notify_all();
  }

  void call(int rank) {
    std::exception_ptr& failure = failures_[static_cast<size_t>(rank)];
    failure = nullptr;
    try {
      (*body_)(rank);
    } catch (...) {
      failure = std::current_exception();
      if (*on_failure_) (*on_failure_)(rank);
    }
  }

  void serve(int rank) {
    for (uint64_t seen = 0;;) {
      step_.wait(seen);
      seen = step_.load();
      if (body_ == nullptr) return;
      call(rank);
      if (running_.fetch_sub(1) == 1) running_.notify_all();
    }
  }

  const std::function<void(int)>* body_ = nullptr;  // null: the threads end
  const std::function<void(int)>* on_failure_ = nullptr;
  std::vector<std::exception_ptr> failures_;  // [ranks]
  std::atomic<uint64_t> step_{0};
  std::atomic<int> running_{0};
  std::vector<std::thread> threads_;  // last: they use the members above
};

}  // namespace fathom
