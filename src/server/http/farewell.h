// Answers connections above the limit with 503 and closes them, without creating a Connection.
//
// Input is read and dropped for ServerOptions::linger_timeout, because closing with unread input
// would make the kernel discard the response. Lives on the listener's loop.
#pragma once

#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <cstddef>
#include <deque>
#include <memory>
#include <vector>

#include "server/http/byte_stream.h"
#include "server/http/server_state.h"

namespace fathom::http {

class Farewell {
 public:
  // TLS handshakes at a time. They make progress once a sweep and take two of them, so this also
  // bounds how many the loop computes in a second, whatever a flood asks for.
  static constexpr size_t kMostHandshakes = 16;

  Farewell(boost::asio::io_context& context, ServerState& state);

  // Sends 503 and takes ownership of the socket. A TLS handshake comes first and must end within
  // linger_timeout. With kMostHandshakes under way the connection is closed at once.
  void tell(boost::asio::ip::tcp::socket socket);

 private:
  using Time = std::chrono::steady_clock::time_point;
  struct Leaving {
    boost::asio::ip::tcp::socket socket;
    std::unique_ptr<ByteStream> stream;
    Time until;
  };
  Time deadline() const;
  void answer(Leaving one);  // after its handshake
  // Reads and drops input; true once the client has closed.
  bool has_ended(Leaving& one);
  void schedule();
  void sweep();
  void sweep_handshakes(Time now);

  ServerState& state_;
  boost::asio::steady_timer timer_;
  std::vector<Leaving> handshaking_;
  std::deque<Leaving> leaving_;  // in the order of their responses
  std::vector<char> scratch_;
  bool scheduled_ = false;
};

}  // namespace fathom::http
