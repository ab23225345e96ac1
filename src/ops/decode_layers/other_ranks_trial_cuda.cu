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
  const uint32_t before = *static_cast<volatile uint32_t*>(peers.epochs);
  const int packets = a.n / kPacketValues;
  const auto at_of = [&](int r, int e, int p) {
    return (int64_t{r} * a.exchanges + e) * a.n + p * kPacketValues;
  };
  for (int e = 0; e < a.exchanges; ++e) {
    const uint32_t epoch = before + static_cast<uint32_t>(e) + 1;
    for (int first = 0; first < packets; first += kCtas * kThreads) {
      const int p = first + static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
      for (int r = 0; r < peers.ranks; ++r) {
        if (r == peers.rank || p >= packets) continue;
        uint32_t bits[kPacketValues];
        for (int i = 0; i < kPacketValues; ++i) bits[i] = a.parts[at_of(r, e, p) + i];
        store_packet_of_peer(packets_of(peers, peers.rank, r, 0, epoch) + p,
                             make_packet(bits, epoch));
      }
    }
    for (int first = 0; first < packets; first += kCtas * kThreads) {
      const int p = first + static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
      for (int r = 0; r < peers.ranks; ++r) {
        if (r == peers.rank) continue;
        const Packet* const from =
            p < packets ? packets_of(peers, r, peers.rank, 0, epoch) + p : nullptr;
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
