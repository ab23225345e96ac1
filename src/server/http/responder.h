// The answer to one request: either send() once, or start_stream(), write()… and end().
//
// Any thread may call anything; no call blocks, does input or output, or fails. What is written is
// queued beside the connection, and the I/O thread is woken for streams at most once a
// ServerOptions::write_delay, so that a step of the engine that writes to 256 streams costs 256
// copies and one wake-up.
//
// The first answer wins: a second send() or start_stream() does nothing and returns false, and so
// does everything after the client has gone. A Responder that goes away unanswered answers 500; one
// that goes away within a stream cuts the connection, so that the client sees that it is
// incomplete.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "server/http/message.h"

namespace fathom::http {

class Exchange;

// How a stream begins. It is sent with chunked coding (HTTP/1.0: until the connection's end).
struct StreamHead {
  int status = 200;
  std::string content_type = {};
  Headers headers = {};
  // Sent whenever nothing has been written for so long, between two writes; empty: never.
  std::string keep_alive = {};
  std::chrono::milliseconds keep_alive_after{15'000};
};

class Responder {
 public:
  explicit Responder(std::shared_ptr<Exchange> exchange);  // the server makes them
  ~Responder();
  Responder(const Responder&) = delete;
  Responder& operator=(const Responder&) = delete;

  bool send(Response response);

  bool start_stream(StreamHead head);
  // Bytes of the body; nothing is ever put inside what one call wrote. Only after start_stream().
  void write(std::string_view bytes);
  void end();

  // Gives up, for want of memory: a 503 if nothing of the answer has been sent, otherwise the end
  // of the connection. Needs no memory itself.
  void give_up();

  // Called once if the answer can't be delivered to its end: the client disconnected, did not read
  // (ServerOptions::stall_timeout), or the server stopped. Called on an I/O thread, or in here if
  // it has already happened; must not block and must not throw. At most one callback; it is
  // dropped, with what it holds, once it was called or the answer has been delivered.
  void on_closed(std::function<void()> callback);

  // What on_closed() tells has happened. Saves the work of what nobody will read.
  bool closed() const;

 private:
  const std::shared_ptr<Exchange> exchange_;
};

}  // namespace fathom::http
