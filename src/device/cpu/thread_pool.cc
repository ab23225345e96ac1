#include "device/cpu/thread_pool.h"

#include <sched.h>

#include <chrono>

namespace fathom {
namespace {

// How long a worker spins for the next run before it sleeps: longer than the gaps inside a step and
// the scheduler's work between two steps, shorter than what anybody would notice as load.
constexpr auto kSpin = std::chrono::microseconds(300);

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return CPU_COUNT(&set);
}

}  // namespace

ThreadPool::ThreadPool(int num_threads)
    : num_threads_(num_threads > 0 ? num_threads : usable_cores()) {
  for (int thread = 1; thread < num_threads_; ++thread) {
    workers_.emplace_back([this, thread] { work(thread); });
  }
}

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run_erased(Erased body, const void* context) {
  if (num_threads_ == 1) {
    body(context, 0);
    return;
  }
  body_ = body;
  context_ = context;
  running_.store(num_threads_ - 1, std::memory_order_relaxed);
  // seq_cst here and in work(): either the worker sees the new generation before it sleeps, or this
  // thread sees it among the sleeping.
  generation_.fetch_add(1);
  if (sleeping_.load() > 0) {
    { const std::lock_guard lock(mutex_); }
    wake_.notify_all();
  }
  body(context, 0);
  // A worker that the operating system has put aside may take milliseconds: yield after a while.
  for (int spins = 0; running_.load(std::memory_order_acquire) != 0; ++spins) {
    if (spins < 10'000) {
      pause();
    } else {
      std::this_thread::yield();
    }
  }
}

void ThreadPool::work(int thread) {
  uint64_t seen = 0;
  while (true) {
    auto spin_until = std::chrono::steady_clock::now() + kSpin;
    int spins = 0;
    while (generation_.load(std::memory_order_acquire) == seen && !stopping_) {
      pause();
      if (++spins % 64 != 0 || std::chrono::steady_clock::now() < spin_until) continue;
      std::unique_lock lock(mutex_);
      sleeping_.fetch_add(1);
      wake_.wait(lock, [&] { return generation_.load() != seen || stopping_; });
      sleeping_.fetch_sub(1);
    }
    if (generation_.load(std::memory_order_acquire) == seen) return;  // stopping
    ++seen;
    body_(context_, thread);
    running_.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace fathom
