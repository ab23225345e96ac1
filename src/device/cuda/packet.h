// A packet of exchanges in which data and flag are one store (block_packets.cuh, peer_packets.cuh):
// 16 bytes, written and read whole. Seven values of 16 bits, and the low 16 bits of the epoch in
// which they were written.
#pragma once

#include <cstdint>

namespace fathom::cuda {

inline constexpr int kPacketValues = 7;

struct alignas(16) Packet {
  uint64_t low, high;  // the epoch in the highest 16 bits
};

}  // namespace fathom::cuda
