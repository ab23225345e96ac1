// The listening socket: accepts connections and deals them out to the loops in turn. Lives on the
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
  // The loops outlive the listener.
  Listener(ServerState& state, const std::vector<std::unique_ptr<IoLoop>>& loops);

  Result<> bind(const std::string& host, int port);  // an error names both
  int port() const { return port_; }
  void resume();  // on the first loop's thread: accepts from here on, whatever has happened before
  void close();   // once the loops have stopped

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
  int64_t generation_ = 0;  // of resume()
  bool failing_ = false;    // the last accept failed, and the log says so
};

}  // namespace fathom::http
