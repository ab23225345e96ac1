#include "server/http/server_state.h"

#include <algorithm>

namespace fathom::http {

void InFlight::add() {
  const std::lock_guard lock(mutex_);
  ++count_;
}

void InFlight::remove() {
  const std::lock_guard lock(mutex_);
  if (--count_ == 0) changed_.notify_all();
}

int64_t InFlight::count() const {
  const std::lock_guard lock(mutex_);
  return count_;
}

bool InFlight::wait_until_none(std::chrono::steady_clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  deadline_ = std::min(deadline_, deadline);
  while (count_ > 0 && std::chrono::steady_clock::now() < deadline_) {
    changed_.wait_until(lock, deadline_);
  }
  return count_ == 0;
}

void InFlight::hasten(std::chrono::steady_clock::time_point deadline) {
  const std::lock_guard lock(mutex_);
  deadline_ = std::min(deadline_, deadline);
  changed_.notify_all();
}

}  // namespace fathom::http
