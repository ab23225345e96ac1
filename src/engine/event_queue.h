// A request's events for a caller that pulls them: sink() goes to Engine::submit, next() waits.
//
// The sink keeps the queue's memory alive, so the EventQueue may go before the request has ended.
// The queue's length is bounded by the request's tokens. One reader; the engine's thread writes.
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

  // The next event, when there is one; nothing once the request's last event has been taken.
  std::optional<Event> next();

  // The same with a limit: nothing also when no event arrived in time (ended() tells which).
  std::optional<Event> next_for(std::chrono::nanoseconds timeout);

  // The last event has been taken.
  bool ended() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace fathom
