// One request's answer on its way from any thread to the I/O thread that owns the connection.
//
// The Responder's side may be called from any thread; it only fills this object and puts it on the
// loop's Outbox. The connection's side is the I/O thread's alone. Both sides share ownership, so
// either may be gone first.
#pragma once

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

// The exchanges of one I/O thread that have news for it. A burst of news costs one wake-up.
class Outbox {
 public:
  // `wake` makes the I/O thread call take() soon; called from any thread, with a lock held.
  explicit Outbox(std::function<void()> wake) : wake_(std::move(wake)) {}

  // `at_once`: wakes although the I/O thread will look by itself before long.
  void push(std::shared_ptr<Exchange> exchange, bool at_once);

  // I/O thread. Replaces `into` by what has come. While `stay_awake` and there was something, later
  // pushes do not wake: the caller promises to call again by itself.
  void take(std::vector<std::shared_ptr<Exchange>>& into, bool stay_awake);
  // The I/O thread is gone: wake() is never called again.
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

  // The Responder's side; see responder.h.
  bool send(Response response);
  bool start_stream(StreamHead head);
  void write(std::string_view bytes);
  void end();
  void on_closed(std::function<void()> callback);
  bool closed() const;
  void abandon();  // there is no Responder any more
  void give_up();  // ends the answer with what needs no memory

  // The connection's side.
  struct News {
    std::variant<std::monostate, Response, StreamHead> head;  // once
    std::string bytes;                                        // of the stream, after the head
    bool ended = false;                                       // nothing will follow
    bool failed = false;                                      // Connection::cut_off()
  };
  // Fills `news` with what has come since the last call; reuses the memory of its bytes.
  void take(News& news);
  void delivered();  // to its end: drops the callback
  void close();      // it can't be delivered: calls the callback
  Connection* connection() const { return connection_; }

 private:
  enum class Stage { kOpen, kStreaming, kEnded, kDelivered, kClosed };
  // Puts the exchange on the outbox, unless it is there. Releases the lock.
  void announce(std::unique_lock<std::mutex>& lock, bool at_once = false);

  const std::shared_ptr<Outbox> outbox_;
  Connection* connection_;  // I/O thread; null once that is gone

  mutable std::mutex mutex_;
  Stage stage_ = Stage::kOpen;
  News news_;
  bool announced_ = false;
  std::function<void()> callback_;
};

}  // namespace fathom::http
