#include "router/circuit_breaker.h"

namespace fathom::router {

std::string_view name_of(CircuitBreaker::State state) {
  switch (state) {
    case CircuitBreaker::State::kClosed:
      return "closed";
    case CircuitBreaker::State::kOpen:
      return "open";
    case CircuitBreaker::State::kHalfOpen:
      return "half_open";
  }
  return "";
}

void CircuitBreaker::enter(State state) {
  state_ = state;
  ++period_;
  failures_ = successes_ = 0;
  trial_ = false;
  if (state == State::kOpen) ++times_opened_;
}

bool CircuitBreaker::admits(Time now) {
  if (state_ == State::kOpen && now >= open_until_) enter(State::kHalfOpen);
  return state_ == State::kClosed || (state_ == State::kHalfOpen && !trial_);
}

CircuitBreaker::Pass CircuitBreaker::begin() {
  trial_ = state_ == State::kHalfOpen;
  return {period_};
}

void CircuitBreaker::succeeded(Pass pass) {
  if (pass.period != period_) return;
  failures_ = 0;
  trial_ = false;
  if (state_ == State::kHalfOpen && ++successes_ >= options_.success_threshold) {
    enter(State::kClosed);
  }
}

void CircuitBreaker::failed(Pass pass, Time now) {
  if (pass.period != period_) return;
  if (state_ == State::kClosed && ++failures_ < options_.failure_threshold) return;
  open_until_ = now + options_.open_for;
  enter(State::kOpen);
}

void CircuitBreaker::forgotten(Pass pass) {
  if (pass.period == period_) trial_ = false;
}

void CircuitBreaker::try_now() {
  if (state_ == State::kOpen) enter(State::kHalfOpen);
}

}  // namespace fathom::router
