// Flag-in-data packets: inter-CTA handoff within a launch through device memory, without counters
// and fences. The reader polls until the packet has the epoch it expects. All CTAs of the launch
// must be co-resident.
//
// Each epoch writes every packet of a buffer once, in place: a CTA writes only when it knows that
// all readers of the previous epoch have finished. Memory is zero at first and epochs begin with 1;
// they may wrap around, because a stored packet is never older than one epoch.
//
// Source: data with flags in one store, from NCCL's LL128 protocol.
#pragma once

#include <cstdint>

#include "device/cuda/packet.h"
#include "device/cuda/rows.cuh"

namespace fathom::cuda {

// st.relaxed.b128
__device__ inline void store_packet(Packet* to, uint64_t low, uint64_t high) {
  asm volatile(
      "{\n.reg .b128 packet;\nmov.b128 packet, {%1, %2};\n"
      "st.relaxed.gpu.global.b128 [%0], packet;\n}" ::"l"(to),
      "l"(low), "l"(high)
      : "memory");
}

// ld.relaxed.b128
__device__ inline Packet load_packet(const Packet* from) {
  Packet packet;
  asm volatile(
      "{\n.reg .b128 packet;\nld.relaxed.gpu.global.b128 packet, [%2];\n"
      "mov.b128 {%0, %1}, packet;\n}"
      : "=l"(packet.low), "=l"(packet.high)
      : "l"(from)
      : "memory");
  return packet;
}

__device__ inline bool is_of(const Packet& packet, uint32_t epoch) {
  return static_cast<uint32_t>(packet.high >> 48) == (epoch & 0xFFFF);
}

// Loads kCount packets, from at(i) on; a null address gives zeros.
template <int kCount, typename At>
__device__ void wait_for_packets(Packet (&packets)[kCount], uint32_t epoch, const At& at) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    packets[i] = {};
    if (at(i) != nullptr) packets[i] = load_packet(at(i));
  }
  for (bool waiting = true; waiting;) {
    waiting = false;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (at(i) != nullptr && !is_of(packets[i], epoch)) {
        packets[i] = load_packet(at(i));
        waiting = true;
      }
    }
  }
}

// The first kCount values.
template <int kCount>
__device__ void unpack_bf16(const Packet& packet, float (&values)[kCount]) {
  static_assert(kCount <= kPacketValues);
  const uint32_t words[4] = {
      static_cast<uint32_t>(packet.low), static_cast<uint32_t>(packet.low >> 32),
      static_cast<uint32_t>(packet.high), static_cast<uint32_t>(packet.high >> 32)};
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    values[i] = i % 2 == 0 ? low_bf16(words[i / 2]) : high_bf16(words[i / 2]);
  }
}

// Rounds values to bf16, seven at most; the eighth is 0.
__device__ inline Packet packet_of(const float (&values)[kPacketValues + 1], uint32_t epoch) {
  const auto four = [&](int i) {
    return uint64_t{pack_bf16(values[i], values[i + 1])} |
           uint64_t{pack_bf16(values[i + 2], values[i + 3])} << 32;
  };
  return {four(0), four(4) | uint64_t{epoch} << 48};
}

// Stores the values of neighbouring lanes, kCount a packet, as `count` packets from `to` on. Called
// by whole warps.
template <int kCount>
__device__ void put_bf16(Packet* to, int count, uint32_t epoch, float value) {
  static_assert(kCount <= kPacketValues);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  float values[kPacketValues + 1] = {};
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] = __shfl_sync(~0u, value, lane * kCount + i);
  if (lane >= count) return;
  const Packet packet = packet_of(values, epoch);
  store_packet(to + lane, packet.low, packet.high);
}

}  // namespace fathom::cuda
