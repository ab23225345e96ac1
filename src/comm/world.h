// The ranks of all nodes, as one process sees them.
//
// Made by join() (comm/rendezvous.h). Owns the connections: those between ranks, which its groups
// share, and the control connection. Ends after its groups and after the threads that use them;
// ending says goodbye to the others, which go on without an error as long as they do not wait for
// this node. The process that is node 0 leads; there is no other leader.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "comm/control_channel.h"
#include "comm/group.h"
#include "comm/rank_connections.h"
#include "comm/world_layout.h"

namespace fathom {

class World {
 public:
  // `control` is null and `connections` empty on a single node.
  World(WorldLayout layout, WorldToken token, RankConnections&& connections,
        std::unique_ptr<ControlChannel> control, AbortWord& abort_word);
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  const WorldLayout& layout() const { return layout_; }
  int size() const { return layout_.size(); }
  // Differs from that of any world before, equal on all nodes; 0 with one node.
  uint64_t epoch() const { return token_.high; }
  bool is_leader() const { return layout_.node_rank == 0; }
  AbortWord& abort_word() { return abort_word_; }

  // The ends, of the ranks of this node, of a group of options.world_ranks (empty: all ranks), in
  // ascending order. All nodes that have ranks of it make it with equal names and ranks.
  std::vector<std::unique_ptr<Group>> make_groups(GroupOptions options);

  // The engine's messages, between node 0 and each other node (comm/control_channel.h).
  void send(int node, std::span<const std::byte> message);
  std::optional<std::vector<std::byte>> receive(int node);
  void wait_until_told(std::chrono::nanoseconds limit);

 private:
  const WorldLayout layout_;
  const WorldToken token_;
  AbortWord& abort_word_;
  std::map<int, std::shared_ptr<PeerLinks>> links_;  // of each rank of this node
  // Ends first: others learn of an orderly end, or of the reason of an abort, before ranks'
  // connections close.
  std::unique_ptr<ControlChannel> control_;
};

}  // namespace fathom
