// The connection of each node to node 0, kept open as long as the world lasts: the engine's
// messages both ways, heartbeats, and the news that a node has failed.
//
// Owns a thread that sends a heartbeat every second and reads what comes. A node that is silent for
// longer than the limit, or whose connection ends without a goodbye, sets this process's abort
// word; node 0 tells the others. An abort of this process is told in the same way, with its reason.
//
// Messages of one node arrive in the order in which they were sent. Sending never waits: what the
// network does not take at once is kept.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "comm/abort_bell.h"
#include "comm/framed_connection.h"
#include "comm/world_layout.h"

namespace fathom {

struct HeartbeatOptions {
  std::chrono::nanoseconds interval = std::chrono::seconds(1);
  // A node that is not heard of for so long has failed.
  std::chrono::nanoseconds silence = std::chrono::milliseconds(2500);
};

class ControlChannel {
 public:
  // connections: on node 0 one for each other node, elsewhere that to node 0; by node.
  ControlChannel(WorldLayout layout, std::map<int, FramedConnection>&& connections,
                 AbortWord& abort_word, HeartbeatOptions options);
  // Says goodbye, unless the abort word is set, and waits a moment until that has been read.
  ~ControlChannel();
  ControlChannel(const ControlChannel&) = delete;
  ControlChannel& operator=(const ControlChannel&) = delete;

  // `message` is at most FramedConnection::kMaxPayload long. Throws CommError. Any thread.
  void send(int node, std::span<const std::byte> message);
  // The next message of this node; no value if it has said goodbye. Waits as long as it takes: a
  // node that fails ends the wait. Throws CommError. Any thread.
  std::optional<std::vector<std::byte>> receive(int node);
  // Once the abort word is set: waits until the other nodes have read why, at most `limit`. A
  // process that ends before leaves them with a broken connection. Any thread.
  void wait_until_told(std::chrono::nanoseconds limit);

 private:
  using Clock = std::chrono::steady_clock;
  struct Peer {
    int node;
    FramedConnection connection;
    Clock::time_point last_heard;
    std::deque<std::vector<std::byte>> received = {};
    size_t received_bytes = 0;
    bool left = false;        // has said goodbye
    bool farewelled = false;  // has read our last message
    bool closed = false;
  };

  void run();
  // These hold mutex_.
  void read(Peer& peer);
  void take(Peer& peer, ControlMessage message);
  void lose(Peer& peer, std::string why);
  void tell_abort();
  bool has_parted(const Peer& peer) const;
  Peer& peer_of(int node);

  const WorldLayout layout_;
  AbortWord& abort_word_;
  const HeartbeatOptions options_;
  AbortBell bell_;
  std::mutex mutex_;
  std::condition_variable news_;  // a message, a goodbye or an abort
  std::deque<Peer> peers_;
  bool told_ = false;     // the abort, to all peers
  bool parting_ = false;  // the destructor waits
  std::thread thread_;    // last: it uses the others
};

}  // namespace fathom
