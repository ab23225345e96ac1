// The listening socket: accepts connections and hands them to the loops round-robin. Used on the
// first loop's thread once started.
#pragma once

#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "server/http/farewell.h"
#include "server/http/io_loop.h"

namespace fathom::http {

class Listener {
 public:
  // `loops` outlives the listener.
  Listener(ServerState& state, const std::vector<std::unique_ptr<IoLoop>>& loops);

  // An error names host and port.
  Result<> bind(const std::string& host, int port);
  int port() const { return port_; }
  // Called on the first loop's thread. Starts accepting, or restarts it after a failure.
  void resume();
  // Called after the loops have stopped.
  void close();

 private:
  void accept();
  void accepted(boost::asio::ip::tcp::socket socket, IoLoop& loop);

  ServerState& state_;
  const std::vector<std::unique_ptr<IoLoop>>& loops_;
  boost::asio::ip::tcp::acceptor acceptor_;
  boost::asio::steady_timer pause_;
  Farewell farewell_;
  int port_ = 0;
  size_t next_ = 0;
  int64_t generation_ = 0;  // counts calls of resume()
  bool failing_ = false;    // the last accept failed and was logged
};

}  // namespace fathom::http
