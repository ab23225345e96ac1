// Queues a request's events for a caller that pulls them: pass sink() to Engine::submit, then call
// next().
//
// The sink keeps the queue's memory alive, so the EventQueue may be destroyed before the request
// has ended. The queue's length is bounded by the request's tokens. One thread reads; the engine's
// thread writes.
#pragma once

#include <chrono>
#include <memory>
#include <optional>

#include "engine/request.h"

namespace fathom {

class EventQueue {
 public:
  EventQueue();

  EventSink sink() const;

  // Waits for the next event. Empty once the request's last event has been taken.
  std::optional<Event> next();

  // The same with a timeout. Empty also on timeout; ended() distinguishes the two.
  std::optional<Event> next_for(std::chrono::nanoseconds timeout);

  // Whether the last event has been taken.
  bool ended() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace fathom
