#include "comm/rendezvous.h"

#include <fmt/format.h>
#include <poll.h>

#include <algorithm>
#include <functional>
#include <list>
#include <thread>
#include <utility>

#include "base/entropy.h"
#include "base/log.h"
#include "comm/join_records.h"
#include "comm/wire.h"

namespace fathom {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kLookMs = 50;  // between two looks at whether a wait is still wanted
constexpr auto kTell = std::chrono::seconds(5);  // between two lines about what is awaited
constexpr auto kFirstBackoff = std::chrono::milliseconds(50);
constexpr auto kLongestBackoff = std::chrono::milliseconds(1000);
constexpr auto kDialLeaderLimit = std::chrono::seconds(5);

// The time that a node has to join, and what it says meanwhile.
class Patience {
 public:
  Patience(std::chrono::nanoseconds limit, const AbortWord& abort_word)
      : abort_word_(abort_word),
        limit_(limit),
        begin_(Clock::now()),
        tell_at_(begin_ + kTell / 5) {}

  Clock::time_point deadline() const { return begin_ + limit_; }
  std::string limit() const {
    return fmt::format("{:.3g} s", std::chrono::duration<double>(limit_).count());
  }
  Result<> check_abort() const {
    if (!abort_word_.aborted()) return {};
    return tl::unexpected(abort_word_.reason().status);
  }
  // Fails if the wait has been aborted or has lasted too long; `what` says what is awaited.
  Result<> check(const std::function<std::string()>& what) {
    FATHOM_RETURN_IF_ERROR(check_abort());
    const auto now = Clock::now();
    if (now >= deadline()) {
      return error(Code::kUnavailable, "gave up after {}: {}", limit(), what());
    }
    if (now >= tell_at_) {
      tell_at_ = now + kTell;
      log_info("{} ({:.0f} s of {})", what(), std::chrono::duration<double>(now - begin_).count(),
               limit());
    }
    return {};
  }

 private:
  const AbortWord& abort_word_;
  const std::chrono::nanoseconds limit_;
  const Clock::time_point begin_;
  Clock::time_point tell_at_;
};

void wait_readable(const std::vector<int>& fds) {
  std::vector<pollfd> polled;
  polled.reserve(fds.size());
  for (const int fd : fds) polled.push_back({fd, POLLIN, 0});
  poll(polled.data(), polled.size(), kLookMs);
}

void refuse(FramedConnection& connection, const std::string& why) {
  WireWriter writer;
  writer.text(why);
  connection.queue(MessageType::kRefused, writer.bytes());
  connection.flush();
}

std::span<const std::byte> bytes_of(const std::vector<std::byte>& record) { return record; }

// Where ranks of other nodes find this node: an address that they reach, any free port.
Result<Fd> listen_for_ranks(int reachable, int& port) {
  FATHOM_TRY(const Endpoint own, local_endpoint(reachable));
  FATHOM_TRY(Fd listener, listen_on({own.host, 0}));
  FATHOM_TRY(const Endpoint bound, local_endpoint(listener.get()));
  port = bound.port;
  return listener;
}

// Node 0.
class Leader {
 public:
  Leader(const JoinOptions& options, AbortWord& abort_word)
      : options_(options), patience_(options.limit, abort_word), abort_word_(abort_word) {}

  Result<std::unique_ptr<World>> join() {
    auto world = try_join();
    if (!world) {
      for (auto& [node, member] : members_) refuse(member.connection, world.error().message);
    }
    return world;
  }

 private:
  struct Member {
    FramedConnection connection;
    NodeHello hello;
    Endpoint endpoint;  // where it listens for ranks
    bool connected = false;
  };

  Result<std::unique_ptr<World>> try_join();
  Result<> open();
  Result<> gather();
  // Reads a connection's hello. Whether it is still awaited; fails if no world can come of it.
  Result<bool> greet(FramedConnection& connection);
  // Notes which nodes have connected their ranks. Fails if one has left.
  Result<> watch_members();
  std::string awaited() const;

  const JoinOptions& options_;
  Patience patience_;
  AbortWord& abort_word_;
  NodeHello own_;
  Fd opened_, rank_listener_;
  int listener_ = -1;
  std::list<FramedConnection> strangers_;  // who have not said who they are
  std::map<int, Member> members_;          // by node rank
};

std::string Leader::awaited() const {
  std::string missing;
  int count = 0;
  for (int node = 1; node < options_.nnodes; ++node) {
    if (members_.contains(node)) continue;
    missing += fmt::format("{}{}", count++ > 0 ? ", " : "", node);
  }
  return fmt::format("waiting for node{} {} of {} at {}", count == 1 ? "" : "s", missing,
                     options_.nnodes, options_.address);
}

Result<> Leader::open() {
  listener_ = options_.listener;
  if (listener_ >= 0) return {};
  FATHOM_TRY(const Endpoint endpoint, parse_endpoint(options_.address));
  while (true) {
    auto opened = listen_on(endpoint);
    if (opened) {
      opened_ = std::move(*opened);
      break;
    }
    if (opened.error().code == Code::kNotFound) {
      // A service's address, or one that a router translates.
      log_warning("{} is no address of this machine: listening on all of its addresses",
                  endpoint.host);
      FATHOM_TRY(opened_, listen_everywhere(endpoint.port));
      break;
    }
    // A cluster's names may be published a moment after its processes have started.
    if (opened.error().code != Code::kUnavailable) return tl::unexpected(opened.error());
    FATHOM_RETURN_IF_ERROR(patience_.check([&] { return opened.error().message; }));
    std::this_thread::sleep_for(std::chrono::milliseconds(kLookMs));
  }
  listener_ = opened_.get();
  return {};
}

Result<bool> Leader::greet(FramedConnection& connection) {
  const bool open = connection.fill();
  const auto message = connection.next();
  if (message && !*message) return open;
  const auto hello = message ? decode_hello(**message) : tl::unexpected(message.error());
  if (!hello) {
    log_warning("a connection to {} was closed: {}", options_.address, hello.error().message);
    return false;
  }
  const std::string different = difference(*hello, own_);
  if (!different.empty()) {
    refuse(connection, different);
    return invalid("{}", different);
  }
  const int node = hello->node_rank;
  std::string refusal;
  if (node < 1 || node >= options_.nnodes) {
    refusal = node == 0 ? "node rank 0 leads and is here already"
                        : fmt::format("node rank {} is not below the number of nodes, {}", node,
                                      options_.nnodes);
  } else if (members_.contains(node)) {
    refusal = fmt::format("node rank {} has come already, from {}", node,
                          members_.at(node).endpoint.host);
  }
  if (!refusal.empty()) {
    log_warning("a node was refused: {}", refusal);
    refuse(connection, refusal);
    return false;
  }
  FATHOM_TRY(Endpoint endpoint, peer_endpoint(connection.fd()));
  endpoint.port = hello->port;
  members_.emplace(node, Member{std::move(connection), *hello, std::move(endpoint)});
  return false;
}

Result<> Leader::gather() {
  while (static_cast<int>(members_.size()) < options_.nnodes - 1) {
    FATHOM_RETURN_IF_ERROR(patience_.check([&] { return awaited(); }));
    std::vector<int> fds = {listener_};
    for (const FramedConnection& stranger : strangers_) fds.push_back(stranger.fd());
    wait_readable(fds);
    while (Fd fd = accept_from(listener_)) strangers_.emplace_back(std::move(fd));
    for (auto stranger = strangers_.begin(); stranger != strangers_.end();) {
      FATHOM_TRY(const bool awaited, greet(*stranger));
      stranger = awaited ? std::next(stranger) : strangers_.erase(stranger);
    }
    // One that has gone while others were awaited may come again.
    for (auto member = members_.begin(); member != members_.end();) {
      const bool open = member->second.connection.fill();
      if (!open) log_warning("node {} has gone while others were awaited", member->first);
      member = open ? std::next(member) : members_.erase(member);
    }
  }
  return {};
}

Result<> Leader::watch_members() {
  FATHOM_RETURN_IF_ERROR(patience_.check_abort());
  for (auto& [node, member] : members_) {
    const bool open = member.connection.flush() && member.connection.fill();
    FATHOM_TRY(const auto message, member.connection.next());
    if (message && message->type == MessageType::kConnected) {
      member.connected = true;
    } else if (message) {
      return invalid("node {} could not join: {}", node, WireReader(message->payload).text());
    } else if (!open) {
      return error(Code::kUnavailable, "node {} ended while it joined", node);
    }
  }
  return {};
}

Result<std::unique_ptr<World>> Leader::try_join() {
  FATHOM_RETURN_IF_ERROR(open());
  FATHOM_TRY(rank_listener_, listen_for_ranks(listener_, own_.port));
  own_.nnodes = options_.nnodes;
  own_.facts = options_.facts;
  FATHOM_RETURN_IF_ERROR(gather());

  NodeWelcome welcome{{unpredictable_bits(), unpredictable_bits()}};
  std::vector<std::string> machines;
  const auto add_machine = [&](const std::string& machine) {
    const auto known = std::find(machines.begin(), machines.end(), machine);
    const bool is_new = machine.empty() || known == machines.end();
    welcome.machine_of_node.push_back(
        static_cast<int>(is_new ? std::ssize(machines) : known - machines.begin()));
    if (is_new) machines.push_back(machine);
  };
  welcome.ranks_of_node.push_back(options_.num_ranks);
  welcome.endpoints.push_back({"", own_.port});
  add_machine(options_.machine);
  for (auto& [node, member] : members_) {
    add_machine(member.hello.machine);
    welcome.ranks_of_node.push_back(member.hello.num_ranks);
    welcome.endpoints.push_back(member.endpoint);
  }
  for (auto& [node, member] : members_) {
    member.connection.queue(MessageType::kWelcome, bytes_of(encode(welcome)));
  }
  const WorldLayout layout{0, welcome.ranks_of_node, welcome.machine_of_node};
  FATHOM_TRY(auto connections,
             connect_ranks(layout, rank_listener_.get(), welcome.endpoints, welcome.token,
                           patience_.deadline(), [&] { return watch_members(); }));
  const auto all_connected = [&] {
    return std::all_of(members_.begin(), members_.end(),
                       [](const auto& entry) { return entry.second.connected; });
  };
  while (!all_connected()) {
    std::vector<int> fds;
    for (const auto& [node, member] : members_) fds.push_back(member.connection.fd());
    wait_readable(fds);
    FATHOM_RETURN_IF_ERROR(watch_members());
    FATHOM_RETURN_IF_ERROR(patience_.check([] { return "waiting for nodes to connect"; }));
  }
  std::map<int, FramedConnection> control;
  for (auto& [node, member] : members_) {
    member.connection.queue(MessageType::kBegin);
    member.connection.flush();
    control.emplace(node, std::move(member.connection));
  }
  members_.clear();
  return std::make_unique<World>(
      layout, welcome.token, std::move(connections),
      std::make_unique<ControlChannel>(layout, std::move(control), abort_word_, options_.heartbeat),
      abort_word_);
}

// Every other node.
class Follower {
 public:
  Follower(const JoinOptions& options, AbortWord& abort_word)
      : options_(options), patience_(options.limit, abort_word), abort_word_(abort_word) {}

  Result<std::unique_ptr<World>> join();

 private:
  Result<Fd> dial(const Endpoint& leader);
  // The next message of node 0.
  Result<ControlMessage> await(FramedConnection& leader, const std::string& what);
  // Fails if node 0 has given up.
  Result<> watch(FramedConnection& leader);

  const JoinOptions& options_;
  Patience patience_;
  AbortWord& abort_word_;
};

Result<Fd> Follower::dial(const Endpoint& leader) {
  std::chrono::milliseconds backoff = kFirstBackoff;
  while (true) {
    auto connected =
        connect_to(leader, std::min(patience_.deadline(), Clock::now() + kDialLeaderLimit));
    if (connected) return connected;
    FATHOM_RETURN_IF_ERROR(patience_.check([&] {
      return fmt::format("waiting for node 0 to answer at {}: {}", options_.address,
                         connected.error().message);
    }));
    std::this_thread::sleep_for(backoff);
    backoff = std::min(2 * backoff, kLongestBackoff);
  }
}

Result<> Follower::watch(FramedConnection& leader) {
  FATHOM_RETURN_IF_ERROR(patience_.check_abort());
  const bool open = leader.flush() && leader.fill();
  FATHOM_TRY(const auto message, leader.next());
  if (message) return invalid("{}", WireReader(message->payload).text());
  if (!open) {
    return error(Code::kUnavailable, "node 0 at {} closed the connection", options_.address);
  }
  return {};
}

Result<ControlMessage> Follower::await(FramedConnection& leader, const std::string& what) {
  bool open = true;
  while (true) {
    FATHOM_TRY(auto message, leader.next());
    if (message) return std::move(*message);
    if (!open) {
      return error(Code::kUnavailable, "node 0 at {} closed the connection", options_.address);
    }
    FATHOM_RETURN_IF_ERROR(patience_.check([&] { return what; }));
    wait_readable({leader.fd()});
    open = leader.flush() && leader.fill();
  }
}

Result<std::unique_ptr<World>> Follower::join() {
  FATHOM_TRY(const Endpoint endpoint, parse_endpoint(options_.address));
  FATHOM_TRY(Fd connected, dial(endpoint));
  FramedConnection leader(std::move(connected));
  NodeHello hello{.nnodes = options_.nnodes,
                  .node_rank = options_.node_rank,
                  .num_ranks = options_.num_ranks,
                  .machine = options_.machine,
                  .facts = options_.facts};
  FATHOM_TRY(const Fd rank_listener, listen_for_ranks(leader.fd(), hello.port));
  leader.queue(MessageType::kHello, encode(hello));
  leader.flush();

  FATHOM_TRY(const ControlMessage answer,
             await(leader, fmt::format("waiting for node 0 at {} to call all nodes together",
                                       options_.address)));
  FATHOM_TRY(NodeWelcome welcome, decode_welcome(answer));
  FATHOM_TRY(const Endpoint dialed, peer_endpoint(leader.fd()));
  if (static_cast<int>(welcome.endpoints.size()) != options_.nnodes ||
      welcome.ranks_of_node[options_.node_rank] != options_.num_ranks) {
    return invalid("node 0 at {} called another world together", options_.address);
  }
  welcome.endpoints[0].host = dialed.host;

  const WorldLayout layout{options_.node_rank, welcome.ranks_of_node, welcome.machine_of_node};
  auto connections = connect_ranks(layout, rank_listener.get(), welcome.endpoints, welcome.token,
                                   patience_.deadline(), [&] { return watch(leader); });
  if (!connections) {
    refuse(leader, connections.error().message);  // node 0 tells the others
    return tl::unexpected(connections.error());
  }
  leader.queue(MessageType::kConnected);
  leader.flush();
  FATHOM_TRY(const ControlMessage begin, await(leader, "waiting for all nodes to connect"));
  if (begin.type != MessageType::kBegin) {
    return invalid("{}", WireReader(begin.payload).text());
  }
  std::map<int, FramedConnection> control;
  control.emplace(0, std::move(leader));
  return std::make_unique<World>(
      layout, welcome.token, std::move(*connections),
      std::make_unique<ControlChannel>(layout, std::move(control), abort_word_, options_.heartbeat),
      abort_word_);
}

}  // namespace

Result<std::unique_ptr<World>> join(const JoinOptions& options, AbortWord& abort_word) {
  if (options.nnodes < 1)
    return invalid("the number of nodes is {}; it is 1 or more", options.nnodes);
  if (options.node_rank < 0 || options.node_rank >= options.nnodes) {
    return invalid("node rank {} is not below the number of nodes, {}", options.node_rank,
                   options.nnodes);
  }
  if (options.num_ranks < 1) return invalid("a node has {} ranks; it needs 1", options.num_ranks);
  if (options.nnodes == 1) {
    return std::make_unique<World>(WorldLayout{0, {options.num_ranks}}, WorldToken{},
                                   RankConnections{}, nullptr, abort_word);
  }
  return options.node_rank == 0 ? Leader(options, abort_word).join()
                                : Follower(options, abort_word).join();
}

}  // namespace fathom
