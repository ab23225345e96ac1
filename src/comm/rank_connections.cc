#include "comm/rank_connections.h"

#include <poll.h>

#include <algorithm>
#include <list>

#include "base/log.h"
#include "comm/framed_connection.h"
#include "comm/wire.h"

namespace fathom {
namespace {

using Clock = std::chrono::steady_clock;

// Between two looks at whether a wait is still wanted.
constexpr int kSliceMs = 50;
// A listener that is there answers at once; a firewall does not.
constexpr auto kDialLimit = std::chrono::seconds(10);

Result<> check_time(Clock::time_point deadline, const StillWanted& still_wanted,
                    std::string_view what) {
  FATHOM_RETURN_IF_ERROR(still_wanted());
  if (Clock::now() >= deadline) return error(Code::kUnavailable, "no answer in time: {}", what);
  return {};
}

struct RankHello {
  WorldToken token;
  int from = -1, to = -1;
};

std::vector<std::byte> encode(const RankHello& hello) {
  WireWriter writer;
  writer.u64(hello.token.high);
  writer.u64(hello.token.low);
  writer.u32(static_cast<uint32_t>(hello.from));
  writer.u32(static_cast<uint32_t>(hello.to));
  return {writer.bytes().begin(), writer.bytes().end()};
}

// Dials rank `to` for rank `from` and waits until it has answered.
Result<Fd> dial(const RankHello& hello, const Endpoint& endpoint, Clock::time_point deadline,
                const StillWanted& still_wanted) {
  auto connected = connect_to(endpoint, std::min(deadline, Clock::now() + kDialLimit));
  if (!connected) {
    return error(Code::kUnavailable, "rank {} cannot reach rank {} at {}: {}", hello.from, hello.to,
                 to_string(endpoint), connected.error().message);
  }
  FramedConnection connection(std::move(*connected));
  connection.queue(MessageType::kRankHello, encode(hello));
  const std::string what =
      fmt::format("rank {} dialing rank {} at {}", hello.from, hello.to, to_string(endpoint));
  bool open = connection.flush();
  while (true) {
    FATHOM_TRY(const auto message, connection.next());
    if (message && message->type == MessageType::kRankWelcome && !connection.has_bytes_left()) {
      return connection.release();
    }
    if (message) {
      return error(Code::kUnavailable, "{}: it was refused: {}", what,
                   WireReader(message->payload).text());
    }
    if (!open) return error(Code::kUnavailable, "{}: the connection was closed", what);
    FATHOM_RETURN_IF_ERROR(check_time(deadline, still_wanted, what));
    pollfd readable{connection.fd(), POLLIN, 0};
    poll(&readable, 1, kSliceMs);
    open = connection.fill();
  }
}

// Takes the connections of ranks of higher nodes, one for each pair.
class Acceptor {
 public:
  Acceptor(const WorldLayout& layout, const WorldToken& token, RankConnections& connections)
      : layout_(layout), token_(token), connections_(connections) {
    const int own = layout.ranks_of_node[layout.node_rank];
    const int higher = layout.size() - layout.first_rank(layout.node_rank + 1);
    missing_ = own * higher;
  }

  Result<> run(int listener, Clock::time_point deadline, const StillWanted& still_wanted) {
    while (missing_ > 0) {
      FATHOM_RETURN_IF_ERROR(check_time(
          deadline, still_wanted, fmt::format("{} connections of other nodes' ranks", missing_)));
      std::vector<pollfd> polled = {{listener, POLLIN, 0}};
      for (const FramedConnection& connection : pending_) {
        polled.push_back({connection.fd(), POLLIN, 0});
      }
      poll(polled.data(), polled.size(), kSliceMs);
      while (Fd fd = accept_from(listener)) pending_.emplace_back(std::move(fd));
      pending_.remove_if([this](FramedConnection& connection) { return !is_pending(connection); });
    }
    return {};
  }

 private:
  // Whether it has yet to say who it is.
  bool is_pending(FramedConnection& connection) {
    const bool open = connection.fill();
    const auto message = connection.next();
    if (!message) {
      log_warning("a connection to this node's ranks was closed: {}", message.error().message);
      return false;
    }
    if (!*message) return open;
    const std::string refusal = take(connection, **message);
    if (refusal.empty()) return false;
    log_warning("a connection to this node's ranks was refused: {}", refusal);
    WireWriter writer;
    writer.text(refusal);
    connection.queue(MessageType::kRefused, writer.bytes());
    connection.flush();
    return false;
  }

  // Keeps the connection, or says why not.
  std::string take(FramedConnection& connection, const ControlMessage& message) {
    WireReader reader(message.payload);
    const WorldToken token{reader.u64(), reader.u64()};
    const auto from = static_cast<int>(reader.u32()), to = static_cast<int>(reader.u32());
    if (message.type != MessageType::kRankHello || !reader.ended()) {
      return "it does not say who it is";
    }
    // Both halves are compared: how long it takes says nothing.
    if (((token.high ^ token_.high) | (token.low ^ token_.low)) != 0) {
      return "it is of another run of this world, or a stranger's";
    }
    if (to < 0 || to >= layout_.size() || !layout_.is_local(to) || from >= layout_.size() ||
        from < layout_.first_rank(layout_.node_rank + 1)) {
      return fmt::format("rank {} has no connection to rank {} on this node", from, to);
    }
    if (connections_.contains({to, from})) {
      return fmt::format("rank {} is connected to rank {} already", from, to);
    }
    connection.queue(MessageType::kRankWelcome);
    if (!connection.flush() || connection.has_bytes_left())
      return "it does not wait for its answer";
    connections_.emplace(std::pair(to, from), connection.release());
    --missing_;
    return {};
  }

  const WorldLayout& layout_;
  const WorldToken& token_;
  RankConnections& connections_;
  std::list<FramedConnection> pending_;
  int missing_ = 0;
};

}  // namespace

Result<RankConnections> connect_ranks(const WorldLayout& layout, int listener,
                                      const std::vector<Endpoint>& endpoints,
                                      const WorldToken& token, Clock::time_point deadline,
                                      const StillWanted& still_wanted) {
  RankConnections connections;
  const int first = layout.first_rank(layout.node_rank);
  // Node 0 only accepts, node 1 dials it and then accepts, and so on: nobody waits in a circle.
  for (int to = 0; to < first; ++to) {
    for (int from = first; from < layout.first_rank(layout.node_rank + 1); ++from) {
      FATHOM_TRY(Fd fd,
                 dial({token, from, to}, endpoints[layout.node_of(to)], deadline, still_wanted));
      connections.emplace(std::pair(from, to), std::move(fd));
    }
  }
  FATHOM_RETURN_IF_ERROR(
      Acceptor(layout, token, connections).run(listener, deadline, still_wanted));
  return connections;
}

}  // namespace fathom
