// Carries one response from any thread to the I/O thread that owns the connection.
//
// The Responder's functions may be called from any thread: they fill this object and put it on the
// loop's Outbox. The connection's functions belong to the I/O thread. Both sides share ownership,
// so either may be destroyed first.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "server/http/message.h"
#include "server/http/responder.h"

namespace fathom::http {

class Connection;
class Exchange;

// Exchanges with news for one I/O thread. A burst of news costs one wake-up.
class Outbox {
 public:
  // `wake` makes the I/O thread call take() soon. It is called from any thread, with a lock held.
  explicit Outbox(std::function<void()> wake) : wake_(std::move(wake)) {}

  // `at_once`: wakes the I/O thread even if it will call take() by itself soon.
  void push(std::shared_ptr<Exchange> exchange, bool at_once);

  // Called by the I/O thread. Replaces `into` by the waiting exchanges. If `stay_awake` is set and
  // there were any, later pushes do not wake: the caller promises to call again by itself.
  void take(std::vector<std::shared_ptr<Exchange>>& into, bool stay_awake);
  // Called when the I/O thread has ended: wake() is never called again.
  void close();

 private:
  std::mutex mutex_;
  std::vector<std::shared_ptr<Exchange>> waiting_;
  bool woken_ = false;  // wake() was called since the last take()
  bool awake_ = false;  // the I/O thread will call take() by itself
  bool closed_ = false;
  const std::function<void()> wake_;
};

class Exchange : public std::enable_shared_from_this<Exchange> {
 public:
  Exchange(std::shared_ptr<Outbox> outbox, Connection* connection)
      : outbox_(std::move(outbox)), connection_(connection) {}

  // Called by the Responder; see responder.h.
  bool send(Response response);
  bool start_stream(StreamHead head);
  void write(std::string_view bytes);
  void end();
  void on_closed(std::function<void()> callback);
  bool closed() const;
  int64_t unsent() const;
  void when_sent(std::function<void()> callback);
  void abandon();  // the Responder is destroyed
  // Ends the response without allocating memory.
  void give_up();

  // Called by the connection.
  struct News {
    std::variant<std::monostate, Response, StreamHead> head;  // set once
    std::string bytes;                                        // of the stream, after the head
    bool ended = false;                                       // nothing will follow
    bool failed = false;                                      // the connection must be cut off
  };
  // Moves what has come since the last call into `news`, whose buffer is reused.
  void take(News& news);
  // Called after a write; `left`: bytes taken and not yet accepted by the kernel.
  void sent(int64_t left);
  // The response was delivered completely: drops the callback.
  void delivered();
  // The response cannot be delivered: calls the callback.
  void close();
  Connection* connection() const { return connection_; }

 private:
  enum class Stage { kOpen, kStreaming, kEnded, kDelivered, kClosed };
  // Puts the exchange on the outbox unless it is there. Releases the lock.
  void announce(std::unique_lock<std::mutex>& lock, bool at_once = false);

  const std::shared_ptr<Outbox> outbox_;
  Connection* connection_;  // used by the I/O thread; null once the connection is gone

  mutable std::mutex mutex_;
  Stage stage_ = Stage::kOpen;
  News news_;
  bool announced_ = false;
  std::function<void()> callback_;
  std::function<void()> when_sent_;
  // Written by the I/O thread with and without the lock.
  std::atomic<int64_t> left_ = 0;             // see sent()
  std::atomic<bool> waits_for_sent_ = false;  // when_sent_ is set
};

}  // namespace fathom::http
