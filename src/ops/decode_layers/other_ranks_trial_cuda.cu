#include "device/cuda/error.h"
#include "device/cuda/peer_packets.cuh"
#include "ops/decode_layers/other_ranks_trial_cuda.h"

namespace fathom::cuda {
namespace {

constexpr int kCtas = 4, kThreads = 256;

// A thread has the same packets of all exchanges; whole warps take as many turns.
__global__ void __launch_bounds__(kThreads)
    other_ranks_kernel(const __grid_constant__ OtherRanksArguments a) {
  const PeerRank& peers = a.peers;
  // All rows have had as many exchanges.
  const uint32_t before = *static_cast<volatile uint32_t*>(peers.epochs);
  const int row_packets = a.n / kPacketValues, packets = a.rows * row_packets;
  const auto at_of = [&](int r, int e, int p) {
    return ((int64_t{r} * a.rows + p / row_packets) * a.exchanges + e) * a.n +
           p % row_packets * kPacketValues;
  };
  const auto place = [&](int reader, int writer, int p, uint32_t epoch) {
    return packets_of(peers, reader, writer, p / row_packets, epoch) + p % row_packets;
  };
  for (int e = 0; e < a.exchanges; ++e) {
    const uint32_t epoch = before + static_cast<uint32_t>(e) + 1;
    for (int first = 0; first < packets; first += kCtas * kThreads) {
      const int p = first + static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
      for (int r = 0; r < peers.ranks; ++r) {
        if (r == peers.rank || p >= packets) continue;
        uint32_t bits[kPacketValues];
        for (int i = 0; i < kPacketValues; ++i) bits[i] = a.parts[at_of(r, e, p) + i];
        store_packet_of_peer(place(peers.rank, r, p, epoch), make_packet(bits, epoch));
      }
    }
    for (int first = 0; first < packets; first += kCtas * kThreads) {
      const int p = first + static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
      for (int r = 0; r < peers.ranks; ++r) {
        if (r == peers.rank) continue;
        const Packet* const from = p < packets ? place(r, peers.rank, p, epoch) : nullptr;
        const Packet packet = wait_for_peer(peers, epoch, from, peers.rank, {});
        if (a.received == nullptr || p >= packets) continue;
        const uint64_t words[2] = {packet.low, packet.high};
        for (int i = 0; i < kPacketValues; ++i) {
          a.received[at_of(r, e, p) + i] = static_cast<uint16_t>(words[i / 4] >> (i % 4 * 16));
        }
      }
    }
  }
}

}  // namespace

void enqueue_other_ranks(const OtherRanksArguments& arguments, cudaStream_t stream) {
  other_ranks_kernel<<<kCtas, kThreads, 0, stream>>>(arguments);
  check(cudaGetLastError(), "launching the other ranks");
}

}  // namespace fathom::cuda
