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
// block_packets.cuh has the like between the CTAs of one launch.
//
// Source: data with flags in one store, from NCCL's LL128 protocol.
#pragma once

#include <cstdint>

#include "device/cuda/peer_group.h"
#include "device/cuda/rows.cuh"

namespace fathom::cuda {

struct alignas(16) PeerPacket {
  uint64_t low, high;  // the epoch in the highest 16 bits
};

// st.relaxed.sys.b128
__device__ inline void store_packet(PeerPacket* to, const PeerPacket& packet) {
  asm volatile(
      "{\n.reg .b128 packet;\nmov.b128 packet, {%1, %2};\n"
      "st.relaxed.sys.global.b128 [%0], packet;\n}" ::"l"(to),
      "l"(packet.low), "l"(packet.high)
      : "memory");
}

// ld.relaxed.sys.b128
__device__ inline PeerPacket load_packet(const PeerPacket* from) {
  PeerPacket packet;
  asm volatile(
      "{\n.reg .b128 packet;\nld.relaxed.sys.global.b128 packet, [%2];\n"
      "mov.b128 {%0, %1}, packet;\n}"
      : "=l"(packet.low), "=l"(packet.high)
      : "l"(from)
      : "memory");
  return packet;
}

// ld.relaxed.sys, st.relaxed.sys: words of PeerFaults.
__device__ inline uint32_t load_host_word(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
__device__ inline void store_host_word(uint32_t* to, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

__device__ inline uint64_t global_nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

__device__ inline PeerPacket make_packet(const uint32_t (&bits)[kPeerPacketValues],
                                         uint32_t epoch) {
  return {bits[0] | bits[1] << 16 | uint64_t{bits[2] | bits[3] << 16} << 32,
          bits[4] | bits[5] << 16 | uint64_t{bits[6] | epoch << 16} << 32};
}

__device__ inline void unpack(const PeerPacket& packet, float (&values)[kPeerPacketValues]) {
  const uint32_t words[4] = {
      static_cast<uint32_t>(packet.low), static_cast<uint32_t>(packet.low >> 32),
      static_cast<uint32_t>(packet.high), static_cast<uint32_t>(packet.high >> 32)};
#pragma unroll
  for (int i = 0; i < kPeerPacketValues; ++i) {
    values[i] = i % 2 == 0 ? low_bf16(words[i / 2]) : high_bf16(words[i / 2]);
  }
}

// Where `writer`'s packets of a row lie in the inbox of `reader`.
__device__ inline PeerPacket* packets_of(const PeerRank& peers, int reader, int writer, int64_t row,
                                         uint32_t epoch) {
  const int64_t place = (epoch % 2 * peers.ranks + writer) * peers.rows + row;
  return peers.inboxes[reader] + place * peers.row_packets;
}

// Waits until packets[r] = *at(r) is of the epoch, for all ranks r but this one; at(r) null: not
// wanted. Called by whole warps. Returns early, with whatever is there, once the group is stopped;
// a wait beyond the limit stops it and says for whom.
template <int kMostRanks, typename At>
__device__ void wait_for_peers(const PeerRank& peers, uint32_t epoch,
                               PeerPacket (&packets)[kMostRanks], const At& at) {
  constexpr uint32_t kTriesBetweenLooks = 4096;  // some 2 ms: a look goes to the host's memory
  const uint64_t flag = epoch & 0xFFFF;
  uint64_t begin = 0;
#pragma unroll
  for (int r = 0; r < kMostRanks; ++r) {
    packets[r] = {};
    if (at(r) != nullptr) packets[r] = load_packet(at(r));
  }
  for (uint32_t tries = 1;; ++tries) {
    int missing = -1;
#pragma unroll
    for (int r = 0; r < kMostRanks; ++r) {
      if (at(r) == nullptr || packets[r].high >> 48 == flag) continue;
      packets[r] = load_packet(at(r));
      missing = r;
    }
    const uint32_t waiting = __ballot_sync(~0u, missing >= 0);
    if (waiting == 0) return;
    if (tries % kTriesBetweenLooks != 0) continue;
    // The first lane that waits looks for all.
    const int looker = __ffs(static_cast<int>(waiting)) - 1;
    bool stop = false;
    if (static_cast<int>(threadIdx.x) % kWarp == looker) {
      const uint64_t now = global_nanoseconds();
      if (begin == 0) begin = now;
      stop = load_host_word(&peers.faults->stop) != 0;
      if (!stop && now - begin > peers.limit_ns) {
        store_host_word(&peers.faults->late[peers.rank], static_cast<uint32_t>(missing) + 1);
        store_host_word(&peers.faults->stop, 1);
        stop = true;
      }
    }
    begin = __shfl_sync(~0u, begin, looker);
    if (__any_sync(~0u, stop)) return;
  }
}

}  // namespace fathom::cuda
