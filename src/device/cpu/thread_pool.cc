#include "device/cpu/thread_pool.h"

#include <sched.h>

#include <chrono>
#include <exception>

namespace fathom {
namespace {

// How long a worker spins for the next run before it sleeps: longer than the gaps inside a step and
// the scheduler's work between two steps, shorter than what anybody would notice as load.
constexpr auto kSpin = std::chrono::microseconds(300);
// About 100 us: longer than any share is late when every thread has a core.
constexpr int kSpinsBeforeYield = 10'000;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// One run's body. A share that throws has ended like any other: the rest is still being worked on,
// with what the caller's frame holds.
struct Shares {
  void (*body)(const void* context, int share);
  const void* context;
  std::mutex mutex = {};
  std::exception_ptr failure = {};  // the first; guarded by the mutex until all shares have ended

  static void run(const void* self, int share) noexcept {
    auto& shares = *static_cast<Shares*>(const_cast<void*>(self));
    try {
      shares.body(shares.context, share);
    } catch (...) {
      const std::lock_guard lock(shares.mutex);
      if (shares.failure == nullptr) shares.failure = std::current_exception();
    }
  }
};

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
    workers_.emplace_back([this] { work(); });
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

int ThreadPool::claim(uint64_t generation) {
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  while (ticket >> kShareBits == generation) {
    const int share = static_cast<int>(ticket & ((1 << kShareBits) - 1));
    if (share == num_threads_) return 0;
    if (ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acquire)) return share;
  }
  return 0;
}

void ThreadPool::run_erased(Erased body, const void* context) {
  if (num_threads_ == 1) {
    body(context, 0);
    return;
  }
  Shares shares{.body = body, .context = context};
  body_ = &Shares::run;
  context_ = &shares;
  unfinished_.store(num_threads_ - 1, std::memory_order_relaxed);
  const uint64_t generation = (ticket_.load(std::memory_order_relaxed) >> kShareBits) + 1;
  // seq_cst here and in work(): either a worker sees the new generation before it sleeps, or this
  // thread sees it among the sleeping.
  ticket_.store(generation << kShareBits | 1);
  if (sleeping_.load() > 0) {
    { const std::lock_guard lock(mutex_); }
    wake_.notify_all();
  }
  Shares::run(&shares, 0);
  while (const int share = claim(generation)) {
    Shares::run(&shares, share);
    unfinished_.fetch_sub(1, std::memory_order_relaxed);
  }
  // A worker may be put aside in the middle of its share: yield after a while.
  for (int spins = 0; unfinished_.load(std::memory_order_acquire) != 0; ++spins) {
    if (spins < kSpinsBeforeYield) {
      pause();
    } else {
      std::this_thread::yield();
    }
  }
  if (shares.failure != nullptr) std::rethrow_exception(shares.failure);
}

void ThreadPool::work() {
  uint64_t seen = 0;
  while (true) {
    const auto spin_until = std::chrono::steady_clock::now() + kSpin;
    int spins = 0;
    while (ticket_.load(std::memory_order_acquire) >> kShareBits == seen && !stopping_) {
      pause();
      if (++spins % 64 != 0 || std::chrono::steady_clock::now() < spin_until) continue;
      std::unique_lock lock(mutex_);
      sleeping_.fetch_add(1);
      wake_.wait(lock, [&] { return ticket_.load() >> kShareBits != seen || stopping_; });
      sleeping_.fetch_sub(1);
    }
    const uint64_t generation = ticket_.load(std::memory_order_acquire) >> kShareBits;
    if (generation == seen) return;  // stopping
    seen = generation;
    while (const int share = claim(generation)) {
      body_(context_, share);
      unfinished_.fetch_sub(1, std::memory_order_release);
    }
  }
}

}  // namespace fathom
