// What other threads have to tell the engine's thread: new requests, aborts, to forget cached
// prefixes, and to stop. Bounded.
//
// A request counts as queued from push() until the engine says that it left the queue, and as alive
// until the engine says that it ended: its last event has been delivered. Every method may be
// called from any thread, but die(), take() and the two note_… are the engine thread's.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "base/status.h"
#include "engine/sequence.h"

namespace fathom {

class Inbox {
 public:
  struct Limits {
    int64_t max_requests = 0;
    int64_t max_tokens = 0;  // of prompts; one request alone may exceed it
  };
  struct News {
    std::vector<std::unique_ptr<ActiveRequest>> requests;
    std::vector<RequestId> aborts;
    bool flush = false;
    bool stop = false;
  };
  struct Counts {
    int64_t queued_requests = 0, queued_tokens = 0, rejected = 0;
  };

  explicit Inbox(const Limits& limits) : limits_(limits) {}

  // push()'s error if it would refuse any request.
  Result<> has_room();
  // kResourceExhausted when the queue is full, kUnavailable after refuse(), stop() or die().
  Result<RequestId> push(std::unique_ptr<ActiveRequest> request);
  void abort(RequestId request);
  void flush();  // the prefix cache

  void refuse();  // no new requests
  void stop();    // nor any other work
  // The engine's thread can serve nobody any more: refuses new requests with `why`.
  void die(Status why) noexcept;
  bool is_dead() const;
  // Waits until die(); false if that took longer.
  bool wait_until_dead(std::chrono::nanoseconds timeout);
  // Waits until no request is alive; false if that took longer.
  bool wait_until_empty(std::chrono::nanoseconds timeout);

  // Replaces `news` by what has arrived; waits for something if `wait`.
  void take(News& news, bool wait);
  void note_left_queue(const ActiveRequest& request);
  void note_ended();

  Counts counts() const;

 private:
  Result<> room();
  void announce();

  const Limits limits_;
  mutable std::mutex mutex_;
  std::condition_variable arrived_, emptied_, died_;
  News news_;
  Counts counts_;
  RequestId last_id_ = 0;
  int64_t alive_ = 0;
  bool refusing_ = false;
  std::optional<Status> death_;        // why the engine is dead
  std::atomic<bool> has_news_{false};  // spares a busy engine the lock
};

}  // namespace fathom
