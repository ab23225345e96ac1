// Keep-alive connections to one replica. Used on the router's thread only.
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "server/client/http_client.h"

namespace fathom::router {

using Socket = boost::asio::ip::tcp::socket;

class ConnectionPool : public std::enable_shared_from_this<ConnectionPool> {
 public:
  // Idle connections are dropped after this long: before servers do (Fathom after 75 s, uvicorn
  // after 5 s by default).
  static constexpr std::chrono::seconds kMostIdle{4};

  ConnectionPool(boost::asio::io_context& context, client::Endpoint endpoint);

  // Returns an idle connection that the replica has not closed; null: there is none.
  std::shared_ptr<Socket> take();
  // Takes back a connection whose last reply is complete.
  void put(std::shared_ptr<Socket> socket);
  void drop_idle() { idle_.clear(); }

  // Connects `socket`, whose close() cancels. A host name is resolved each time: its address may
  // change while the router runs.
  void connect(std::shared_ptr<Socket> socket,
               std::function<void(const boost::system::error_code&)> then);

  boost::asio::io_context& context() { return context_; }
  const client::Endpoint& endpoint() const { return endpoint_; }

 private:
  struct Idle {
    std::shared_ptr<Socket> socket;
    std::chrono::steady_clock::time_point since;
  };

  boost::asio::io_context& context_;
  const client::Endpoint endpoint_;
  boost::asio::ip::tcp::resolver resolver_;
  std::optional<boost::asio::ip::tcp::endpoint> address_;  // none: the host is a name
  std::vector<Idle> idle_;                                 // the longest idle first
};

}  // namespace fathom::router
