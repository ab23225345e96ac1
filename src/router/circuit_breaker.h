// Circuit breaker of one replica: keeps requests away while they fail.
//
//   kClosed    requests pass; `failure_threshold` failures in a row open it
//   kOpen      none passes for `open_for`
//   kHalfOpen  one request at a time passes as a trial; `success_threshold` successes in a row
//   close
//              it, a failure opens it again
//
// The time is an argument, so tests need no clock. Not thread-safe.
#pragma once

#include <chrono>
#include <cstdint>
#include <string_view>

namespace fathom::router {

using Time = std::chrono::steady_clock::time_point;

struct BreakerOptions {
  int64_t failure_threshold = 5, success_threshold = 1;  // at least 1
  std::chrono::nanoseconds open_for = std::chrono::seconds(30);
};

class CircuitBreaker {
 public:
  enum class State { kClosed, kOpen, kHalfOpen };
  // One admitted request. The outcome of one that began before the last change of state is ignored:
  // it says nothing about the replica as it is now.
  struct Pass {
    int64_t period = 0;
  };

  explicit CircuitBreaker(const BreakerOptions& options) : options_(options) {}

  // Returns whether a request may begin.
  bool admits(Time now);
  // Begins a request. Precondition: admits().
  Pass begin();
  // Each pass ends with one of these. `forgotten`: the outcome says nothing about the replica.
  void succeeded(Pass pass);
  void failed(Pass pass, Time now);
  void forgotten(Pass pass);
  // The replica answers again after it could not be reached: an open breaker need not wait longer.
  void try_now();

  State state() const { return state_; }
  int64_t times_opened() const { return times_opened_; }

 private:
  void enter(State state);

  const BreakerOptions options_;
  State state_ = State::kClosed;
  int64_t period_ = 0;                    // counts changes of state
  int64_t failures_ = 0, successes_ = 0;  // in a row, in this state
  bool trial_ = false;                    // a trial is in flight
  Time open_until_;
  int64_t times_opened_ = 0;
};

std::string_view name_of(CircuitBreaker::State state);  // "closed", "open", "half_open"

}  // namespace fathom::router
