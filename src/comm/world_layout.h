// Which ranks are on which node. A node is a process; ranks count through all nodes in order.
#pragma once

#include <fmt/format.h>

#include <string>
#include <vector>

namespace fathom {

struct WorldLayout {
  int node_rank = 0;               // of this process
  std::vector<int> ranks_of_node;  // [nnodes], how many each has; >= 1
  // [nnodes], a number for each machine; empty: each node has its own.
  std::vector<int> machine_of_node = {};

  int nnodes() const { return static_cast<int>(ranks_of_node.size()); }
  int size() const { return first_rank(nnodes()); }
  int first_rank(int node) const {
    int first = 0;
    for (int i = 0; i < node; ++i) first += ranks_of_node[i];
    return first;
  }
  int node_of(int rank) const {
    int node = 0;
    while (rank >= first_rank(node + 1)) ++node;
    return node;
  }
  bool is_local(int rank) const { return node_of(rank) == node_rank; }
  // Number of ranks of all nodes on this node's machine.
  int ranks_on_machine() const {
    if (machine_of_node.empty()) return ranks_of_node[node_rank];
    int ranks = 0;
    for (int node = 0; node < nnodes(); ++node) {
      if (machine_of_node[node] == machine_of_node[node_rank]) ranks += ranks_of_node[node];
    }
    return ranks;
  }
  // "node 1 (ranks 2 to 3)", for messages.
  std::string describe_node(int node) const {
    const int first = first_rank(node), last = first_rank(node + 1) - 1;
    if (first == last) return fmt::format("node {} (rank {})", node, first);
    return fmt::format("node {} (ranks {} to {})", node, first, last);
  }
};

}  // namespace fathom
