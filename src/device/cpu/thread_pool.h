// The threads that a CPU rank computes with.
//
// Owns its workers; the thread that calls run() works along. One run() at a time: the pool belongs
// to the rank's thread. Workers spin for a short while between runs, because a decode step is a
// hundred runs of a few microseconds each, and then sleep, so that an idle engine costs nothing. A
// share that no worker has begun when the caller is done with its own is the caller's: on a machine
// that is busy with something else a run never waits for a worker to be scheduled.
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

  // Calls body(share) once for each share 0 … num_threads() - 1, at most one a thread at a time,
  // and returns when all have returned. What the bodies wrote is visible to the caller. What one
  // throws is thrown here then.
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
  using Erased = void (*)(const void* context, int share);
  void run_erased(Erased body, const void* context);
  void work();
  // Takes the next share of this generation: its number, or 0 when none is left.
  int claim(uint64_t generation);

  const int num_threads_;
  std::vector<std::thread> workers_;

  // generation << kShareBits | the next share to take. One word, so that a worker that was put
  // aside can never take a share of a run other than the one whose body it reads.
  static constexpr int kShareBits = 16;
  alignas(64) std::atomic<uint64_t> ticket_{0};
  Erased body_ = nullptr;
  const void* context_ = nullptr;
  std::atomic<bool> stopping_{false};
  alignas(64) std::atomic<int> unfinished_{0};
  alignas(64) std::atomic<int> sleeping_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
};

}  // namespace fathom
