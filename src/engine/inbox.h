// Messages from other threads to the engine's thread: new requests, aborts, flushing the prefix
// cache, stopping, a lost runner. Bounded.
//
// A request counts as queued from push() to note_left_queue(), and as alive from push() to
// note_ended(), which follows the delivery of its last event. Every method may be called from any
// thread, except die(), take(), note_left_queue() and note_ended(): these are for the engine's
// thread.
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
    // Prompt tokens; a single request may exceed it when the queue is empty.
    int64_t max_tokens = 0;
    RequestId ids_after = 0;  // the first id is one more
  };
  struct News {
    std::vector<std::unique_ptr<ActiveRequest>> requests;
    std::vector<RequestId> aborts;
    bool flush = false;
    bool stop = false;
    bool lost = false;
  };
  struct Counts {
    int64_t queued_requests = 0, queued_tokens = 0, rejected = 0;
  };

  explicit Inbox(const Limits& limits) : limits_(limits), last_id_(limits.ids_after) {}

  // The error that push() would return for any request.
  Result<> has_room();
  // The same if the queue were empty.
  Result<> is_open() const;
  // kResourceExhausted when the queue is full, kUnavailable after refuse(), stop() or die().
  Result<RequestId> push(std::unique_ptr<ActiveRequest> request);
  void abort(RequestId request);
  void flush();  // asks for the prefix cache to be dropped

  void refuse();  // refuses new requests
  void stop();    // refuses new requests and asks the engine to stop
  void lose();    // tells that the runner is lost
  void poke();    // ends a wait()
  // The engine is dead: refuses new requests with `why` from now on.
  void die(Status why) noexcept;
  bool is_dead() const;
  // Waits until die(); false on timeout.
  bool wait_until_dead(std::chrono::nanoseconds timeout);
  // Waits until no request is alive; false on timeout.
  bool wait_until_empty(std::chrono::nanoseconds timeout);

  // Replaces `news` by what has arrived. With `wait`, blocks until there is something.
  void take(News& news, bool wait);
  // Blocks until there is something, or poke(), or this long.
  void wait(std::chrono::nanoseconds timeout);
  void note_left_queue(const ActiveRequest& request);
  void note_ended();

  Counts counts() const;

 private:
  Result<> open() const;
  Result<> room();
  void announce();

  const Limits limits_;
  mutable std::mutex mutex_;
  std::condition_variable arrived_, emptied_, died_;
  News news_;
  Counts counts_;
  RequestId last_id_;
  int64_t alive_ = 0;
  bool refusing_ = false;
  std::optional<Status> death_;        // why the engine is dead
  std::atomic<bool> has_news_{false};  // lets a busy engine skip the lock
};

}  // namespace fathom
