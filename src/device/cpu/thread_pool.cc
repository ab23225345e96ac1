#include "device/cpu/thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <exception>

namespace fathom {
namespace {

// How long a worker spins for the next run before it sleeps: longer than the gaps inside a step and
// the scheduler's work between two steps, shorter than what anybody would notice as load.
constexpr auto kSpin = std::chrono::microseconds(300);
// How long the caller spins for workers between two looks at whether they have a CPU.
constexpr auto kPatience = std::chrono::microseconds(100);
// The kernel gives a neighbour a CPU for some milliseconds at a time, and a run in which a worker
// loses its CPU lasts as long. That is worth a worker that works for so many times as long; one
// that does not is parked for the shortest time, and for twice as long as before whenever a trial
// ends so.
constexpr int kWorthwhile = 2;
constexpr auto kShortestParking = std::chrono::milliseconds(10);
constexpr auto kLongestParking = std::chrono::milliseconds(160);
// A worker may wake up on the caller's CPU and on another the next time; one that does so many
// times without a share between is of no use.
constexpr int kMeetings = 4;
// Between two looks at the clock.
constexpr int kSpinsALook = 64;
// How long the caller waits for workers to begin before it takes their shares: they need some
// hundred nanoseconds to learn of a run.
constexpr int kSpinsToHelp = 16;

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

std::chrono::nanoseconds time_of(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

}  // namespace

int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return CPU_COUNT(&set);
}

ThreadPool::ThreadPool(int num_threads)
    : num_threads_(num_threads > 0 ? num_threads : usable_cores()),
      shares_(std::make_unique<Share[]>(static_cast<size_t>(num_threads_))),
      active_(num_threads_) {
  for (int index = 1; index < num_threads_; ++index) {
    Worker& worker = workers_.emplace_back(index);
    worker.thread = std::thread([this, &worker] { work(worker); });
    pthread_getcpuclockid(worker.thread.native_handle(), &worker.cpu_clock);
  }
}

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  unpark_.notify_all();
  for (Worker& worker : workers_) worker.thread.join();
}

bool ThreadPool::claim(int share, uint64_t generation) {
  std::atomic<uint64_t>& claimed = shares_[static_cast<size_t>(share)].claimed;
  uint64_t last = claimed.load(std::memory_order_relaxed);
  return last < generation &&
         claimed.compare_exchange_strong(last, generation, std::memory_order_acquire);
}

void ThreadPool::work_on(int share, uint64_t generation, Worker* worker) {
  if (worker != nullptr) worker->busy.store(true, std::memory_order_relaxed);
  body_(context_, share);
  if (worker != nullptr) {
    worker->busy.store(false, std::memory_order_relaxed);
    worker->meetings = 0;
  }
  // seq_cst here and in wait_for_workers(): either the caller sees that all have ended before it
  // sleeps, or this thread sees that it does.
  shares_[static_cast<size_t>(share)].ended.store(generation);
  if (worker != nullptr && caller_sleeps_) {
    { const std::lock_guard lock(mutex_); }
    done_.notify_one();
  }
}

void ThreadPool::help(int begin, uint64_t generation, Worker* worker) {
  for (int share = begin; share < num_threads_; ++share) {
    if (claim(share, generation)) work_on(share, generation, worker);
  }
}

bool ThreadPool::all_ended(uint64_t generation) const {
  for (int share = 1; share < num_threads_; ++share) {
    if (shares_[static_cast<size_t>(share)].ended.load() != generation) return false;
  }
  return true;
}

void ThreadPool::run_erased(Erased body, const void* context) {
  if (num_threads_ == 1) {
    body(context, 0);
    return;
  }
  Shares shares{.body = body, .context = context};
  if (crowded_.load(std::memory_order_relaxed)) {
    crowded_.store(false, std::memory_order_relaxed);
    judge(1, Clock::duration::max() / kWorthwhile);
  }
  if (num_active() < num_threads_) unpark_in_time();
  if (num_active() == 1) {
    for (int share = 0; share < num_threads_; ++share) Shares::run(&shares, share);
  } else {
    const uint64_t generation = generation_.load(std::memory_order_relaxed) + 1;
    const int cpu = sched_getcpu();
    body_ = &Shares::run;
    context_ = &shares;
    caller_cpu_.store(cpu, std::memory_order_relaxed);
    // seq_cst here and in wait_for_run(): either a worker sees the new generation before it sleeps,
    // or this thread sees it among the sleeping.
    generation_.store(generation);
    if (sleeping_.load() > 0) {
      { const std::lock_guard lock(mutex_); }
      wake_.notify_all();
    }
    Shares::run(&shares, 0);
    if (num_active() < num_threads_) help(num_active(), generation, nullptr);
    wait_for_workers(generation);
  }
  if (shares.failure != nullptr) std::rethrow_exception(shares.failure);
}

void ThreadPool::wait_for_workers(uint64_t generation) {
  Clock::time_point begin{}, looked{};
  int share = 1;  // the ones before it have ended
  for (int spins = 1;; ++spins) {
    while (share < num_threads_ && shares_[static_cast<size_t>(share)].ended.load(
                                       std::memory_order_acquire) == generation) {
      ++share;
    }
    if (share == num_threads_) return;
    pause();
    if (spins == kSpinsToHelp) help(1, generation, nullptr);
    if (spins % kSpinsALook != 0) continue;
    const Clock::time_point now = Clock::now();
    if (begin == Clock::time_point()) begin = now;
    if (now - begin < kPatience) continue;
    begin = now;
    // Shares may be unequal: only one whose worker does not compute is worth a measure.
    const int displaced = count_displaced(looked);
    if (displaced == 0) continue;
    // Without this thread its CPU may be the worker's.
    std::unique_lock lock(mutex_);
    caller_sleeps_ = true;
    done_.wait(lock, [&] { return all_ended(generation); });
    caller_sleeps_ = false;
    judge(displaced, Clock::now() - now + kPatience);
    return;
  }
}

int ThreadPool::count_displaced(Clock::time_point& looked) {
  const bool first = looked == Clock::time_point();
  const Clock::time_point now = Clock::now();
  int displaced = 0;
  for (Worker& worker : workers_) {
    if (!worker.busy.load(std::memory_order_relaxed)) continue;
    const std::chrono::nanoseconds cpu_time = time_of(worker.cpu_clock);
    if (!first && (cpu_time - worker.cpu_time) * 2 < now - looked) ++displaced;
    worker.cpu_time = cpu_time;
  }
  looked = now;
  return displaced;
}

void ThreadPool::judge(int displaced, std::chrono::nanoseconds lost) {
  const Clock::time_point now = Clock::now();
  const bool worthwhile = now - together_since_ >= kWorthwhile * lost;
  together_since_ = now;
  if (worthwhile) {
    parking_ = {};
    return;
  }
  parking_ = std::clamp<std::chrono::nanoseconds>(2 * parking_, kShortestParking, kLongestParking);
  active_.store(std::max(1, num_active() - displaced), std::memory_order_relaxed);
  unpark_at_ = now + parking_;
}

void ThreadPool::unpark_in_time() {
  const Clock::time_point now = Clock::now();
  if (now < unpark_at_) return;
  together_since_ = now;
  unpark_at_ = now + parking_;
  caller_cpu_.store(sched_getcpu(), std::memory_order_relaxed);
  {
    const std::lock_guard lock(mutex_);
    active_.store(num_active() + 1, std::memory_order_relaxed);
  }
  unpark_.notify_all();
}

bool ThreadPool::meets_caller(Worker& worker) {
  if (sched_getcpu() != caller_cpu_.load(std::memory_order_relaxed)) return false;
  if (++worker.meetings == kMeetings) {
    worker.meetings = 0;
    crowded_ = true;
  }
  return true;
}

uint64_t ThreadPool::wait_for_run(Worker& worker, uint64_t seen) {
  const auto generation = [&] { return generation_.load(std::memory_order_acquire); };
  const auto is_parked = [&] { return worker.index >= num_active() && !stopping_; };
  auto spin_until = Clock::now() + kSpin;
  bool all_begun = seen == 0;  // the shares of the run that this thread has seen
  for (int spins = 1; !stopping_ && (generation() == seen || is_parked()); ++spins) {
    if (is_parked()) {
      std::unique_lock lock(mutex_);
      unpark_.wait(lock, [&] { return !is_parked(); });
      continue;
    }
    pause();
    if (spins % kSpinsALook != 0) continue;
    // On the caller's CPU this thread would only keep the caller from working.
    if (!meets_caller(worker)) {
      if (!all_begun) {
        help(1, seen, &worker);
        all_begun = true;
        spin_until = Clock::now() + kSpin;
      }
      if (Clock::now() < spin_until) continue;
    }
    std::unique_lock lock(mutex_);
    sleeping_.fetch_add(1);
    wake_.wait(lock, [&] { return generation_.load() != seen || stopping_; });
    sleeping_.fetch_sub(1);
  }
  return generation();
}

void ThreadPool::work(Worker& worker) {
  uint64_t seen = 0;
  while (true) {
    const uint64_t generation = wait_for_run(worker, seen);
    if (generation == seen) return;  // stopping
    seen = generation;
    if (meets_caller(worker)) continue;  // another thread takes the share
    if (claim(worker.index, generation)) work_on(worker.index, generation, &worker);
    if (num_active() < num_threads_) help(num_active(), generation, &worker);
  }
}

}  // namespace fathom
