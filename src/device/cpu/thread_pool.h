// The threads that a CPU rank computes with.
//
// Owns its workers; the thread that calls run() works along. One run() at a time: the pool belongs
// to the rank's thread. Workers spin for a short while between runs, because a decode step is a
// hundred runs of a few microseconds each, and then sleep, so that an idle engine costs nothing.
//
// A worker's share has its own number, so that it finds in its caches what it used there last. Each
// share has a cache line for its claim and its end: threads meet in no line but the one that
// announces a run.
//
// Other programs may take a worker's CPU away. A share that no worker has begun when another thread
// is done with its own is that thread's, so that a run never waits for a worker to be scheduled. A
// worker that loses its CPU within a share, or finds itself on the caller's, is parked for a while:
// as many threads take part as there are CPUs for them. Shares are the same ones whoever works on
// them: what a run computes does not depend on parked workers.
#pragma once

#include <time.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>

namespace fathom {

// How many CPUs this process may use; at least 1.
int usable_cores();

class ThreadPool {
 public:
  // num_threads >= 1 counts the caller; 0 means one a core that this process may use.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return num_threads_; }
  // The caller and the workers that are not parked. For the calling thread.
  int num_active() const { return active_.load(std::memory_order_relaxed); }

  // Calls body(share) once for each share 0 … num_threads() - 1, at most one a thread at a time,
  // and returns when all have returned. What the bodies wrote is visible to the caller. What one
  // throws is thrown here then.
  template <typename Body>
  void run(const Body& body) {
    run_erased(
        [](const void* context, int thread) { (*static_cast<const Body*>(context))(thread); },
        &body);
  }

  // Calls body(piece) once for each piece 0 … count - 1: a thread's first piece is the one of its
  // number, and who is done takes the next of the rest. Which thread has a piece depends on time.
  template <typename Body>
  void run_pieces(int count, const Body& body) {
    if (count <= num_threads_) {
      return run([&](int thread) {
        if (thread < count) body(thread);
      });
    }
    std::atomic<int> next = num_threads_;
    run([&](int thread) {
      for (int piece = thread; piece < count;
           piece = next.fetch_add(1, std::memory_order_relaxed)) {
        body(piece);
      }
    });
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
  using Clock = std::chrono::steady_clock;
  using Erased = void (*)(const void* context, int share);
  // Two cache lines: the prefetcher of Intel's cores brings them in pairs.
  static constexpr size_t kApart = 128;
  struct alignas(kApart) Share {
    std::atomic<uint64_t> claimed{0};  // the last run in which a thread took it
    std::atomic<uint64_t> ended{0};    // and in which it ended
  };
  struct Worker {
    explicit Worker(int number) : index(number) {}
    const int index;  // 1 … num_threads() - 1; parked while index >= active_
    alignas(kApart) std::atomic<bool> busy{false};  // in a share
    clockid_t cpu_clock{};                          // its CPU time
    std::chrono::nanoseconds cpu_time{};            // of that clock when the caller last looked
    int meetings = 0;  // with the caller on its CPU since its last share
    std::thread thread;
  };

  void run_erased(Erased body, const void* context);
  void work(Worker& worker);
  // Takes a share of the run `generation`; false if a thread has taken it, or the run has ended.
  bool claim(int share, uint64_t generation);
  // Works on a share that this thread has claimed; `worker` is null for the caller.
  void work_on(int share, uint64_t generation, Worker* worker);
  // Takes and works on what no thread has begun among the shares [begin, num_threads()).
  void help(int begin, uint64_t generation, Worker* worker);
  bool all_ended(uint64_t generation) const;
  // Whether the worker, which calls this, is on the caller's CPU.
  bool meets_caller(Worker& worker);
  // Waits for the next run. Its generation; `seen` when the pool ends.
  uint64_t wait_for_run(Worker& worker, uint64_t seen);
  // Waits until all shares have ended; judges the workers that were without a CPU meanwhile.
  void wait_for_workers(uint64_t generation);
  // Workers in a share that have not computed for half of the time since the last look.
  int count_displaced(Clock::time_point& looked);
  // After a run that lasted so much longer because workers were without a CPU: parks them unless
  // what they did since the last such run is worth it.
  void judge(int displaced, std::chrono::nanoseconds lost);
  void unpark_in_time();

  const int num_threads_;
  std::deque<Worker> workers_;

  const std::unique_ptr<Share[]> shares_;

  // The line that announces a run. A run ends only when each of its shares was claimed for it, so
  // who claims one reads the body that belongs to it.
  alignas(kApart) std::atomic<uint64_t> generation_{0};
  Erased body_ = nullptr;
  const void* context_ = nullptr;
  std::atomic<int> caller_cpu_{-1};  // when its run began
  std::atomic<int> active_;          // written by the caller
  std::atomic<bool> stopping_{false};
  std::atomic<bool> caller_sleeps_{false};
  alignas(kApart) std::atomic<int> sleeping_{0};  // workers that the next run has to wake
  std::atomic<bool> crowded_{false};              // a worker meets the caller again and again
  std::mutex mutex_;
  std::condition_variable wake_, unpark_, done_;

  // The caller's: when parked workers are tried again, since when the active ones have had CPUs,
  // and for how long workers were parked last.
  Clock::time_point unpark_at_, together_since_;
  std::chrono::nanoseconds parking_{0};
};

}  // namespace fathom
