// The threads that a CPU rank computes with.
//
// Owns its workers; the thread that calls run() works along as thread 0. One run() at a time: the
// pool belongs to the rank's thread. Workers spin for a short while between runs, because a decode
// step is a hundred runs of a few microseconds each, and then sleep, so that an idle engine costs
// nothing.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace fathom {

class ThreadPool {
 public:
  // num_threads >= 1 counts the caller; 0 means one a core that this process may use.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return num_threads_; }

  // Calls body(thread) once on every thread, thread = 0 … num_threads() - 1, and returns when all
  // have returned. What the bodies wrote is visible to the caller. Bodies do not throw.
  template <typename Body>
  void run(const Body& body) {
    run_erased(
        [](const void* context, int thread) { (*static_cast<const Body*>(context))(thread); },
        &body);
  }

  // Splits [0, count) into one contiguous range a thread, each a multiple of `grain` (but the
  // last), and calls body(begin, end) for those that are not empty. Small counts stay on the
  // caller.
  template <typename Body>
  void parallel_for(int64_t count, int64_t grain, const Body& body) {
    const int64_t grains = (count + grain - 1) / grain;
    if (grains <= 1 || num_threads_ == 1) {
      if (count > 0) body(int64_t{0}, count);
      return;
    }
    run([&](int thread) {
      const int64_t begin = grains * thread / num_threads_ * grain;
      const int64_t end = grains * (thread + 1) / num_threads_ * grain;
      if (begin < end && begin < count) body(begin, end < count ? end : count);
    });
  }

 private:
  using Erased = void (*)(const void* context, int thread);
  void run_erased(Erased body, const void* context);
  void work(int thread);

  const int num_threads_;
  std::vector<std::thread> workers_;

  // One cache line for what the caller writes, one for what the workers do.
  alignas(64) std::atomic<uint64_t> generation_{0};
  Erased body_ = nullptr;
  const void* context_ = nullptr;
  std::atomic<bool> stopping_{false};
  alignas(64) std::atomic<int> running_{0};
  alignas(64) std::atomic<int> sleeping_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
};

}  // namespace fathom
