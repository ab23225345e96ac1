// The memory through which ranks on the GPUs of one process exchange rows inside kernels: each rank
// has an inbox on its device, into which the others write over NVLink (peer_packets.cuh), and
// signals by which launches of all ranks begin and end together (peer_barrier.cuh). No part of an
// exchange passes through the host.
//
// Several ranks may share a device, for tests. Their launches wait for one another, so each rank's
// stream needs a hardware queue of its own: CUDA_DEVICE_MAX_CONNECTIONS, 8 by default, has to be
// larger than the number of streams before the device is first used.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <vector>

#include "device/cuda/device_array.h"
#include "device/cuda/packet.h"
#include "device/cuda/pinned_array.h"
#include "device/cuda/planted_fault.h"
#include "device/most_peers.h"

namespace fathom::cuda {

// What host and waiting kernels tell one another, in pinned host memory. Written once each.
struct PeerFaults {
  uint32_t stop;              // not 0: waits end at once
  uint32_t late[kMostPeers];  // of rank r: 1 + the rank that it waited for longer than the limit
};

// One rank's view of the group, passed to kernels by value. Plain pointers: the group outlives all
// launches.
struct PeerRank {
  int32_t rank = 0, ranks = 1;
  Packet* inboxes[kMostPeers] = {};    // of each rank: [2][ranks][rows][row_packets]
  uint32_t* epochs = nullptr;          // [rows], this rank's: exchanges of each row so far
  uint32_t* signals[kMostPeers] = {};  // of each rank: [2][kMostPeers], see peer_barrier.cuh
  uint32_t* barrier = nullptr;         // [2], this rank's: barriers so far, CTAs that have ended
  PeerFaults* faults = nullptr;
  uint64_t limit_ns = 0;
  int64_t rows = 0, row_packets = 0;  // of an inbox
  // Whether other ranks are on this device; a group sees its own only. A launch that waits for
  // another rank must not let the next one begin then: chains of launches that begin early could
  // fill the device with one rank's.
  bool shares_device = false;
  FATHOM_PLANTED_FAULT
};

class PeerGroup {
 public:
  // Rank r is on device devices[r]; up to kMostPeers ranks. An exchange is of up to `rows` rows of
  // up to `columns` bf16 values; inboxes take 2 * ranks * rows * columns * 16 / 7 bytes a rank. A
  // kernel waits up to `limit` for a rank. Throws DeviceError, also where two devices cannot reach
  // each other's memory.
  PeerGroup(std::vector<int> devices, int64_t rows, int64_t columns,
            std::chrono::nanoseconds limit = std::chrono::seconds(30));
  PeerGroup(const PeerGroup&) = delete;
  PeerGroup& operator=(const PeerGroup&) = delete;

  // Bytes that the group takes on a rank's device; 0 for one rank.
  static int64_t bytes_of_rank(int ranks, int64_t rows, int64_t columns);

  int size() const { return static_cast<int>(devices_.size()); }
  PeerRank rank(int rank) const;

  // Ends all waits, now and from now on: kernels return with undefined results. Any thread.
  void stop();
  // Whether waits have been ended, by stop() or by a rank that waited too long. Any thread.
  bool stopped() const;
  // A rank that waited for another longer than the limit, which has then stopped the group.
  struct Late {
    int waiting, missing;
  };
  std::optional<Late> late() const;

 private:
  const std::vector<int> devices_;
  const int64_t rows_, row_packets_;
  const std::chrono::nanoseconds limit_;
  std::vector<DeviceArray<Packet>> inboxes_;
  std::vector<DeviceArray<uint32_t>> epochs_;
  std::vector<DeviceArray<uint32_t>> signals_;  // followed by the barrier's words
  PinnedArray<PeerFaults> faults_;
};

}  // namespace fathom::cuda
