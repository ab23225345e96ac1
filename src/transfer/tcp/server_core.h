// What the connections and sessions of a transfer server have in common. I/O thread only, except
// the counters.
#pragma once

#include <array>
#include <atomic>
#include <boost/asio/io_context.hpp>
#include <map>
#include <memory>
#include <set>

#include "transfer/tcp/transfer_server.h"

namespace fathom {

class AcceptedConnection;
class ServerSession;

struct ServerCore {
  explicit ServerCore(const TransferServerOptions& the_options) : options(the_options) {}

  void count(ConnectionRefusal refusal) { ++refused[static_cast<size_t>(refusal)]; }

  const TransferServerOptions options;
  TransferServer::MakeLink make_link;
  // Sessions hold it too: engines may put pieces when the server has gone.
  std::shared_ptr<boost::asio::io_context> context = std::make_shared<boost::asio::io_context>(1);
  std::set<std::shared_ptr<AcceptedConnection>> handshakes;
  std::map<uint64_t, std::shared_ptr<ServerSession>> sessions;
  std::atomic<int64_t> num_sessions{0}, orders{0}, pieces_sent{0}, bytes_sent{0},
      lane_pieces_sent{0};
  bool lane_failed = false;  // none is offered any more
  std::array<std::atomic<int64_t>, kNumConnectionRefusals> refused{};
};

}  // namespace fathom
