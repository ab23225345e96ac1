// One client connection: reads requests one at a time and sends their responses in order. Created,
// used and destroyed on its loop's thread.
//
//   kHandshake   TLS handshake in progress.
//   kReading     Reading a request, or idle.
//   kAnswering   The handler runs, or its response is being sent. Input is still read, up to the
//                length of a head, to detect a disconnect. A half-close and a close look alike
//                until something is sent: the first client gets its response, the second answers
//                with RST.
//   kLingering   The last response is sent. Input is dropped until the client closes, because
//                closing with unread input would make the kernel discard the response.
//   kClosed      The socket is closed.
#pragma once

#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "server/http/byte_stream.h"
#include "server/http/dispatcher.h"
#include "server/http/exchange.h"
#include "server/http/request_reader.h"
#include "server/http/send_queue.h"
#include "server/http/server_state.h"

namespace fathom::http {

class IoLoop;

class Connection : public std::enable_shared_from_this<Connection> {
 public:
  Connection(IoLoop& loop, boost::asio::ip::tcp::socket socket, ConnectionCount count);
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  void start();
  // Sends what the exchange has collected.
  void flush();
  // Applies time limits and sends keep-alives.
  void check(std::chrono::steady_clock::time_point now);
  // Closes the connection at once.
  void stop();

  size_t place = 0;  // index in the loop's list

 private:
  using Time = std::chrono::steady_clock::time_point;
  enum class State { kHandshake, kReading, kAnswering, kLingering, kClosed };
  // How a response ended, for the log.
  enum class Ending { kDelivered, kClosedByClient, kCutOff, kStopped };

  struct Answer {
    std::shared_ptr<Exchange> exchange;
    Exchange::News news;
    // Copied from the request, for the head and the log.
    std::string id, method, path, cors_origin;
    Time received;
    bool http10 = false;
    bool head_only = false;  // HEAD: no body is sent
    // State of the response.
    bool close_after = false;
    int status = 0;       // 0: the head is not queued yet
    bool probed = false;  // kProbe, the first bytes of every head, is sent
    bool is_stream = false;
    bool chunked = false;  // otherwise a stream's bytes are sent without framing
    bool ended = false;    // the last byte is queued
    int64_t bytes_sent = 0;
    std::string keep_alive;
    std::chrono::milliseconds keep_alive_after{0};
    Time last_queued;                // when bytes of a stream were last queued
    std::optional<Time> full_since;  // since when more than send_buffer_bytes is unsent
  };

  // Calls step(). An exception closes this connection and no other.
  template <typename Step>
  void guarded(Step step);
  void wait_readable();
  void wait_writable();

  void on_handshake();
  void on_readable();
  void received(std::string_view bytes);
  void on_end();
  void watch_half_closed();
  bool wants_input() const;

  void advance(std::string_view bytes);
  void limit_head();
  void on_head_timeout();
  void on_head(bool more_bytes_are_here);
  void account_body();
  void release_body();
  void on_request();
  void begin_answer();
  void refuse(Response response, bool close_after);
  void answer_next();

  void flush_news();
  void queue_head(const Response& response);
  void queue_head(const StreamHead& head);
  void queue_stream(std::string_view bytes);
  void count_response(int status);
  void send_queued();
  void finish_answer();
  void start_lingering();
  void end_answer(Ending ending);
  void cut_off();
  void close(Ending ending);
  std::string_view without_probe(std::string_view head) const;
  void log_answer(const Answer& answer, Ending ending) const;

  void check_reading(Time now);
  void check_answering(Time now);

  IoLoop& loop_;
  const ConnectionCount count_;
  boost::asio::ip::tcp::socket socket_;
  const std::string peer_;
  const std::unique_ptr<ByteStream> stream_;
  State state_ = State::kReading;
  bool waiting_readable_ = false, waiting_writable_ = false;
  // TLS: the last read waits until the descriptor is writable, the last write until it is readable.
  bool read_wants_write_ = false, write_wants_read_ = false;
  bool advancing_ = false;  // advance() is on the call stack

  // Request.
  std::unique_ptr<RequestReader> reader_;  // null until the first byte of a request
  Dispatcher::Decision decision_;
  std::string ahead_;  // pipelined input after the current request
  Time deadline_;      // of the current state
  std::unique_ptr<boost::asio::steady_timer>
      head_timer_;     // set while a head or handshake is incomplete
  Time window_began_;  // current window of the body's rate limit
  int64_t window_bytes_ = 0;
  int64_t counted_body_bytes_ = 0;  // this connection's share of ServerState::body_bytes
  bool client_ended_ = false;

  // Response.
  std::unique_ptr<Answer> answer_;  // null outside kAnswering
  SendQueue queue_;
  std::optional<Time> blocked_since_;  // since when the kernel accepts no bytes
};

}  // namespace fathom::http
