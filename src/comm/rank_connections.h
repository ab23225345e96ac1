// Connects the ranks of this node with those of the others: one connection for each pair.
//
// The node with the higher number dials. A connection says which ranks it joins and shows the
// world's token, which node 0 made and told the nodes; one that does not know it is refused.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "base/status.h"
#include "comm/socket.h"
#include "comm/world_layout.h"

namespace fathom {

// What only members of one world know.
struct WorldToken {
  uint64_t high = 0, low = 0;
};

// By (rank of this node, rank of another one).
using RankConnections = std::map<std::pair<int, int>, Fd>;

// Called again and again while something is awaited; its error ends the wait.
using StillWanted = std::function<Result<>()>;

// endpoints[node]: where that node listens for ranks; `listener` is this node's.
Result<RankConnections> connect_ranks(const WorldLayout& layout, int listener,
                                      const std::vector<Endpoint>& endpoints,
                                      const WorldToken& token,
                                      std::chrono::steady_clock::time_point deadline,
                                      const StillWanted& still_wanted);

}  // namespace fathom
