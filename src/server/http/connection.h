// One client's connection: reads requests, one at a time, and sends their answers in that order.
// Made, used and destroyed on its loop's thread.
//
//   kHandshake   TLS
//   kReading     a request, or waiting for one
//   kAnswering   one is with its handler, or its answer is being sent; what the client sends
//                meanwhile is kept, up to a head's length, so that its disconnect is seen. A client
//                that shuts its sending side down and one that closes look alike until something
//                is sent to them: the first gets its answer, the second answers with a reset
//   kLingering   the last answer is sent: input is dropped until the client closes too, because
//                closing with input unread would make the kernel drop the answer
//   kClosed
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
  void flush();                                           // the exchange has news
  void check(std::chrono::steady_clock::time_point now);  // time limits, keep-alive
  void stop();                                            // cuts everything off

  size_t place = 0;  // in the loop's list

 private:
  using Time = std::chrono::steady_clock::time_point;
  enum class State { kHandshake, kReading, kAnswering, kLingering, kClosed };
  // How an answer ended, for the log.
  enum class Ending { kDelivered, kClosedByClient, kCutOff, kStopped };

  struct Answer {
    std::shared_ptr<Exchange> exchange;
    Exchange::News news;
    // The request's, for the head and the log.
    std::string id, method, path, cors_origin;
    Time received;
    bool http10 = false;
    bool head_only = false;  // no body is sent
    // The answer's.
    bool close_after = false;
    int status = 0;       // 0: not begun
    bool probed = false;  // kProbe, which begins every head, is sent
    bool is_stream = false;
    bool chunked = false;  // else a stream's bytes go out as they are
    bool ended = false;    // its last byte is queued
    int64_t bytes_sent = 0;
    std::string keep_alive;
    std::chrono::milliseconds keep_alive_after{0};
    Time last_queued;                // something of a stream
    std::optional<Time> full_since;  // more than send_buffer_bytes is unsent
  };

  // Calls step() and cuts this connection off, alone, if it throws.
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
  bool read_wants_write_ = false, write_wants_read_ = false;  // TLS
  bool advancing_ = false;                                    // advance() is on the stack

  // Reading.
  std::unique_ptr<RequestReader> reader_;  // null while nothing of a request has come
  Dispatcher::Decision decision_;
  std::string ahead_;  // input behind the request that is being answered
  Time deadline_;      // of the state
  std::unique_ptr<boost::asio::steady_timer>
      head_timer_;     // while a head or handshake is unfinished
  Time window_began_;  // of the body, for its rate
  int64_t window_bytes_ = 0;
  int64_t counted_body_bytes_ = 0;  // in ServerState::body_bytes
  bool client_ended_ = false;

  // Answering.
  std::unique_ptr<Answer> answer_;  // null in other states
  SendQueue queue_;
  std::optional<Time> blocked_since_;  // the kernel takes nothing
};

}  // namespace fathom::http
