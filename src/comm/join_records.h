// What nodes tell each other while they join, as records on the wire.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "base/status.h"
#include "comm/framed_connection.h"
#include "comm/rank_connections.h"
#include "comm/socket.h"

namespace fathom {

// Raised whenever a record or a frame changes.
inline constexpr uint32_t kProtocol = 2;

// A node to node 0.
struct NodeHello {
  uint32_t protocol = kProtocol;
  int nnodes = 0;
  int node_rank = 0;
  int num_ranks = 0;
  int port = 0;  // where it listens for ranks, at the address that it dials from
  std::string machine = {};
  std::map<std::string, std::string> facts = {};
};
std::vector<std::byte> encode(const NodeHello& hello);
Result<NodeHello> decode_hello(const ControlMessage& message);

// Node 0 to each node, when all have come.
struct NodeWelcome {
  WorldToken token;
  std::vector<int> ranks_of_node = {};
  std::vector<int> machine_of_node = {};  // as WorldLayout's
  // Where each node listens for ranks; of node 0 the port alone: its host is where it was dialed.
  std::vector<Endpoint> endpoints = {};
};
std::vector<std::byte> encode(const NodeWelcome& welcome);
Result<NodeWelcome> decode_welcome(const ControlMessage& message);

// Why a node is refused although it has a place: what differs from node 0's, both values named.
// Empty: nothing does.
std::string difference(const NodeHello& theirs, const NodeHello& leaders);

}  // namespace fathom
