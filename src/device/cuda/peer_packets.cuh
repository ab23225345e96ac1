// Packets between ranks: bf16 values that carry the epoch in which they were written, so that data
// and flag are one store. A packet is 16 bytes, written and read whole: seven values of 16 bits,
// and the epoch's low 16 bits. The reader polls its own memory until a packet has the epoch that it
// waits for; nothing is cleared.
//
// Reuse: an inbox has two halves, for even and odd epochs. A rank writes epoch e + 2 of a row after
// it has ended e + 1, for which every other rank wrote its packets after the launch of its epoch e
// had ended, and with it all reads of e. Epochs are counted a row; all ranks exchange the same
// rows.
//
// block_packets.cuh: the same between the CTAs of one launch.
//
// Source: data with flags in one store, from NCCL's LL128 protocol.
#pragma once

#include <cstdint>

#include "device/cuda/block_packets.cuh"
#include "device/cuda/peer_wait.cuh"

namespace fathom::cuda {

// st.relaxed.sys.b128
__device__ inline void store_packet_of_peer(Packet* to, const Packet& packet) {
  asm volatile(
      "{\n.reg .b128 packet;\nmov.b128 packet, {%1, %2};\n"
      "st.relaxed.sys.global.b128 [%0], packet;\n}" ::"l"(to),
      "l"(packet.low), "l"(packet.high)
      : "memory");
}

// ld.relaxed.sys.b128
__device__ inline Packet load_packet_of_peer(const Packet* from) {
  Packet packet;
  asm volatile(
      "{\n.reg .b128 packet;\nld.relaxed.sys.global.b128 packet, [%2];\n"
      "mov.b128 {%0, %1}, packet;\n}"
      : "=l"(packet.low), "=l"(packet.high)
      : "l"(from)
      : "memory");
  return packet;
}

__device__ inline Packet make_packet(const uint32_t (&bits)[kPacketValues], uint32_t epoch) {
  return {bits[0] | bits[1] << 16 | uint64_t{bits[2] | bits[3] << 16} << 32,
          bits[4] | bits[5] << 16 | uint64_t{bits[6] | epoch << 16} << 32};
}

// Where `writer`'s packets of a row lie in the inbox of `reader`.
__device__ inline Packet* packets_of(const PeerRank& peers, int reader, int writer, int64_t row,
                                     uint32_t epoch) {
  const int64_t place = (epoch % 2 * peers.ranks + writer) * peers.rows + row;
  return peers.inboxes[reader] + place * peers.row_packets;
}

// Waits until packets[r] = *at(r) is of the epoch, for all ranks r but this one; at(r) null: not
// wanted. Called by whole warps. Returns early, with whatever is there, once the group is stopped;
// a wait beyond the limit stops it and says for whom.
template <int kMostRanks, typename At>
__device__ void wait_for_peers(const PeerRank& peers, uint32_t epoch, Packet (&packets)[kMostRanks],
                               const At& at) {
  uint64_t begin = 0;
#pragma unroll
  for (int r = 0; r < kMostRanks; ++r) {
    packets[r] = {};
    if (at(r) != nullptr) packets[r] = load_packet_of_peer(at(r));
  }
  for (uint32_t polls = 1;; ++polls) {
    int missing = -1;
#pragma unroll
    for (int r = 0; r < kMostRanks; ++r) {
      if (at(r) == nullptr || is_of(packets[r], epoch)) continue;
      if (FATHOM_PLANTED(peers, kAnyPacket) && packets[r].high >> 48 != 0) continue;
      packets[r] = load_packet_of_peer(at(r));
      missing = r;
    }
    const uint32_t waiting = __ballot_sync(~0u, missing >= 0);
    if (waiting == 0) return;
    if (polls % kPollsBetweenLooks != 0) continue;
    // The first lane that waits looks for all.
    const int looker = __ffs(static_cast<int>(waiting)) - 1;
    bool stop = false;
    if (static_cast<int>(threadIdx.x) % kWarp == looker) stop = gives_up(peers, missing, begin);
    begin = __shfl_sync(~0u, begin, looker);
    if (__any_sync(~0u, stop)) return;
  }
}

// One packet a lane: *at, of rank `writer`, once it is of the epoch; `own` where `at` is null.
// Called by whole warps, whose lanes may wait for different ranks. Ends early as wait_for_peers()
// does.
__device__ inline Packet wait_for_peer(const PeerRank& peers, uint32_t epoch, const Packet* at,
                                       int writer, const Packet& own) {
  uint64_t begin = 0;
  Packet packet = at != nullptr ? load_packet_of_peer(at) : own;
  for (uint32_t polls = 1;; ++polls) {
    bool waits = at != nullptr && !is_of(packet, epoch);
    if (FATHOM_PLANTED(peers, kAnyPacket) && packet.high >> 48 != 0) waits = false;
    const uint32_t waiting = __ballot_sync(~0u, waits);
    if (waiting == 0) return packet;
    if (waits) packet = load_packet_of_peer(at);
    if (polls % kPollsBetweenLooks != 0) continue;
    // The first lane that waits looks for all.
    const int looker = __ffs(static_cast<int>(waiting)) - 1;
    bool stop = false;
    if (static_cast<int>(threadIdx.x) % kWarp == looker) stop = gives_up(peers, writer, begin);
    begin = __shfl_sync(~0u, begin, looker);
    if (__any_sync(~0u, stop)) return packet;
  }
}

}  // namespace fathom::cuda
