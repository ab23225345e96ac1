#include "engine/step_watchdog.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <utility>

namespace fathom {
namespace {

// The resolution of a limit: it is overrun by at most one tick.
constexpr int kTicks = 32;

}  // namespace

void StepWatchdog::end_process(const std::string& what, std::chrono::nanoseconds limit) {
  const std::string line = fmt::format(
      "fathom: {} has not ended within {:.3g} s: the GPU is stuck, and the process ends\n", what,
      std::chrono::duration<double>(limit).count());
  std::fputs(line.c_str(), stderr);
  std::fflush(stderr);
  std::_Exit(kExitStuck);
}

StepWatchdog::StepWatchdog(Expired expired)
    : expired_(std::move(expired)), thread_([this] { run(); }) {}

StepWatchdog::~StepWatchdog() {
  {
    const std::scoped_lock lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void StepWatchdog::begin(std::string what, std::chrono::nanoseconds limit) {
  {
    const std::scoped_lock lock(mutex_);
    what_ = std::move(what);
    // With an unchanged limit the thread need not be woken: its next tick sees the new watch.
    const bool wakes = limit != limit_ || !watching_;
    limit_ = limit;
    used_ = std::chrono::nanoseconds(0);
    watching_ = limit.count() > 0;
    if (!wakes) return;
  }
  changed_.notify_all();
}

void StepWatchdog::end() {
  const std::scoped_lock lock(mutex_);
  watching_ = false;
}

void StepWatchdog::run() {
  std::unique_lock lock(mutex_);
  auto last = std::chrono::steady_clock::now();
  while (!stopping_) {
    if (limit_.count() == 0) {
      changed_.wait(lock);
      last = std::chrono::steady_clock::now();
      continue;
    }
    const auto tick = std::max(limit_ / kTicks, std::chrono::nanoseconds(1'000'000));
    changed_.wait_for(lock, tick);
    const auto now = std::chrono::steady_clock::now();
    if (watching_) used_ += std::min<std::chrono::nanoseconds>(now - last, 2 * tick);
    last = now;
    if (!watching_ || used_ < limit_) continue;
    watching_ = false;
    const std::string what = what_;
    const auto limit = limit_;
    lock.unlock();
    expired_(what, limit);
    lock.lock();
  }
}

}  // namespace fathom
