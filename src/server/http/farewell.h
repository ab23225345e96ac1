// Connections above the limit: each is told 503 and closed, without a Connection being made for it.
// What its client sends is read and dropped for ServerOptions::linger_timeout, because closing with
// input unread would make the kernel drop the answer. Lives on the listener's loop.
#pragma once

#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <deque>
#include <vector>

#include "server/http/server_state.h"

namespace fathom::http {

class Farewell {
 public:
  Farewell(boost::asio::io_context& context, ServerState& state);

  // Answers and takes the connection. Within TLS, where an answer would cost a handshake, it is
  // closed at once.
  void tell(boost::asio::ip::tcp::socket socket);

 private:
  struct Leaving {
    boost::asio::ip::tcp::socket socket;
    std::chrono::steady_clock::time_point until;
  };
  bool has_ended(Leaving& one);  // reads what has come
  void schedule();
  void sweep();

  ServerState& state_;
  boost::asio::steady_timer timer_;
  std::deque<Leaving> leaving_;  // in the order in which they came
  std::vector<char> scratch_;
  bool scheduled_ = false;
};

}  // namespace fathom::http
