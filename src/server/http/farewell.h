// Answers connections above the limit with 503 and closes them, without creating a Connection.
//
// Input is read and dropped for ServerOptions::linger_timeout, because closing with unread input
// would make the kernel discard the response. Lives on the listener's loop.
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

  // Sends 503 and takes ownership of the socket. A TLS connection is closed at once, because a
  // response would cost a handshake.
  void tell(boost::asio::ip::tcp::socket socket);

 private:
  struct Leaving {
    boost::asio::ip::tcp::socket socket;
    std::chrono::steady_clock::time_point until;
  };
  // Reads and drops input; true once the client has closed.
  bool has_ended(Leaving& one);
  void schedule();
  void sweep();

  ServerState& state_;
  boost::asio::steady_timer timer_;
  std::deque<Leaving> leaving_;  // in order of arrival
  std::vector<char> scratch_;
  bool scheduled_ = false;
};

}  // namespace fathom::http
