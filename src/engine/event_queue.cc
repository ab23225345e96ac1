#include "engine/event_queue.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <utility>

namespace fathom {

struct EventQueue::State {
  mutable std::mutex mutex;
  std::condition_variable arrived;
  std::deque<Event> events;
  bool ended = false;  // the reader has taken the last event

  std::optional<Event> take() {
    if (ended || events.empty()) return std::nullopt;
    Event event = std::move(events.front());
    events.pop_front();
    ended = event.last;
    return event;
  }
};

EventQueue::EventQueue() : state_(std::make_shared<State>()) {}

EventSink EventQueue::sink() const {
  return [state = state_](const Event& event) {
    const std::lock_guard lock(state->mutex);
    state->events.push_back(event);
    state->arrived.notify_one();
  };
}

std::optional<Event> EventQueue::next() {
  std::unique_lock lock(state_->mutex);
  state_->arrived.wait(lock, [&] { return state_->ended || !state_->events.empty(); });
  return state_->take();
}

std::optional<Event> EventQueue::next_for(std::chrono::nanoseconds timeout) {
  std::unique_lock lock(state_->mutex);
  state_->arrived.wait_for(lock, timeout, [&] { return state_->ended || !state_->events.empty(); });
  return state_->take();
}

bool EventQueue::ended() const {
  const std::lock_guard lock(state_->mutex);
  return state_->ended;
}

}  // namespace fathom
