// The bound of every wait for another rank: a limit of time, and a word of the host that ends all
// waits (PeerFaults).
#pragma once

#include <cstdint>

#include "device/cuda/peer_group.h"
#include "device/cuda/ptx.cuh"

namespace fathom::cuda {

// Polls between two calls of gives_up(), which looks into the host's memory: some 2 ms.
inline constexpr uint32_t kPollsBetweenLooks = 4096;

// Whether a wait for rank `missing` ends now without it: the group is stopped, or the wait, which
// began at the first call's time `begin` (0 before it), is beyond the limit. Then this call stops
// the group and says for whom.
__device__ inline bool gives_up(const PeerRank& peers, int missing, uint64_t& begin) {
  const uint64_t now = global_nanoseconds();
  if (begin == 0) begin = now;
  if (load_system_word(&peers.faults->stop) != 0) return true;
  if (now - begin <= peers.limit_ns) return false;
  store_system_word(&peers.faults->late[peers.rank], static_cast<uint32_t>(missing) + 1);
  store_system_word(&peers.faults->stop, 1);
  return true;
}

}  // namespace fathom::cuda
