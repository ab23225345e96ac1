// The response to one request: either send() once, or start_stream(), write()… and end().
//
// Any thread may call. No call blocks, does I/O or fails. Writes are queued with the connection,
// and streams wake the I/O thread at most once per ServerOptions::write_delay: an engine step that
// writes to 256 streams costs 256 copies and one wake-up.
//
// The first response wins: a second send() or start_stream() does nothing and returns false, and so
// does every call after the client has disconnected. A Responder destroyed before any response
// sends 500. One destroyed within a stream aborts the connection, so that the client sees that the
// body is incomplete.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "server/http/message.h"

namespace fathom::http {

class Exchange;

// Head of a stream. HTTP/1.1 uses chunked coding; HTTP/1.0 ends the body by closing.
struct StreamHead {
  int status = 200;
  std::string content_type = {};
  Headers headers = {};
  // Sent between writes whenever nothing was written for `keep_alive_after`; empty: never.
  std::string keep_alive = {};
  std::chrono::milliseconds keep_alive_after{15'000};
};

class Responder {
 public:
  explicit Responder(std::shared_ptr<Exchange> exchange);  // called by the server
  ~Responder();
  Responder(const Responder&) = delete;
  Responder& operator=(const Responder&) = delete;

  bool send(Response response);

  bool start_stream(StreamHead head);
  // Appends bytes to the body. The bytes of one call are never interrupted by a keep-alive.
  // Precondition: start_stream() was called.
  void write(std::string_view bytes);
  void end();

  // Ends the response when memory is exhausted: 503 if nothing of it was sent, otherwise the
  // connection is closed. Does not allocate.
  void give_up();

  // Sets the callback for a response that cannot be delivered completely: the client disconnected,
  // did not read (ServerOptions::stall_timeout), or the server stopped. It is called once, on an
  // I/O thread, or in this function if that has already happened. It must not block or throw. There
  // is at most one callback. It is destroyed after its call or after delivery.
  void on_closed(std::function<void()> callback);

  // Returns how many bytes of a stream are written and not yet given to the kernel, about.
  int64_t unsent() const;
  // Calls `callback` once all that is written is given to the kernel: on an I/O thread, or in this
  // function if that is so already. It must not block, throw or use this responder. It is dropped,
  // not called, when the response is delivered or cannot be. There is at most one at a time.
  void when_sent(std::function<void()> callback);

  // Returns whether the condition of on_closed() holds, so that useless work can be skipped.
  bool closed() const;

 private:
  const std::shared_ptr<Exchange> exchange_;
};

}  // namespace fathom::http
