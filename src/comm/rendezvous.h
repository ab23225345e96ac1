// How the processes of several nodes become one world.
//
// Node 0 listens; the others dial it until it answers, and say who they are. What must be equal on
// all nodes is compared before anything is loaded, and a difference is refused with both values.
// Then node 0 tells everyone where the others listen, and ranks are connected to ranks.
//
// The network between the nodes is trusted: nothing is encrypted. A connection of a process that
// does not belong to this world is refused and disturbs nobody.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <string>

#include "base/status.h"
#include "comm/world.h"

namespace fathom {

struct JoinOptions {
  int nnodes = 1;
  int node_rank = 0;
  // HOST:PORT of node 0, the same on all nodes; not used with one node.
  std::string address = {};
  // Ranks of this node; nodes may differ.
  int num_ranks = 1;
  // What must be equal on all nodes: version, model's hash, flags.
  std::map<std::string, std::string> facts = {};
  // Equal on nodes that share a machine's memory; empty: this one shares with nobody.
  std::string machine = {};
  // For all of it. A node that does not come in this time is named.
  std::chrono::nanoseconds limit = std::chrono::minutes(10);
  HeartbeatOptions heartbeat = {};
  // Node 0: a non-blocking listening socket to use instead of opening `address`, owned by the
  // caller; -1: none.
  int listener = -1;
};

// Blocks until all nodes have come and all ranks are connected. What it waits for is logged. An
// abort ends it with the abort's status. The word outlives the world.
Result<std::unique_ptr<World>> join(const JoinOptions& options, AbortWord& abort_word);

}  // namespace fathom
