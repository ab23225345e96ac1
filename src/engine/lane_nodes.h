// Which lanes a node (a process) has a part in.
#pragma once

#include <cstdint>
#include <vector>

#include "comm/world_layout.h"
#include "placement/placement.h"

namespace fathom {

// 1 or 0 for each lane.
struct NodeLanes {
  std::vector<uint8_t> has;      // some of the lane's ranks are on the node
  std::vector<uint8_t> samples;  // the lane's first rank, which has its logits, is

  size_t size() const { return has.size(); }
};

inline NodeLanes lanes_of_node(const WorldLayout& layout, int node, const Placement& placement) {
  NodeLanes lanes;
  for (int lane = 0; lane < placement.dp; ++lane) {
    bool has = false;
    for (int rank = 0; rank < placement.tp; ++rank) {
      has = has || layout.node_of(placement.rank_of(lane, rank)) == node;
    }
    lanes.has.push_back(has ? 1 : 0);
    lanes.samples.push_back(layout.node_of(placement.rank_of(lane, 0)) == node ? 1 : 0);
  }
  return lanes;
}

// Whether each rank of a lane is on the node of its counterpart of the other, so that pages can be
// copied without a network.
inline bool lanes_share_nodes(const WorldLayout& layout, const Placement& placement, int lane,
                              int other) {
  for (int rank = 0; rank < placement.tp; ++rank) {
    if (layout.node_of(placement.rank_of(lane, rank)) !=
        layout.node_of(placement.rank_of(other, rank))) {
      return false;
    }
  }
  return true;
}

}  // namespace fathom
