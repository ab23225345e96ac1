// Barriers in a launch that all ranks make: after begin_together() the results of each rank's
// earlier launches can be read in its memory; end_together() returns in the launch's last CTA when
// what all ranks have written into this one's memory is there, so that the next launch finds it.
//
// Signals are epochs, counted in device memory: a captured launch can be replayed, and nothing is
// cleared. A rank's launches of this kind follow one another, and CTAs of one launch need not be
// co-resident; those of different ranks must be able to run at the same time.
//
// A wait beyond the limit stops the group (peer_wait.cuh); results are undefined then.
#pragma once

#include <cstdint>

#include "device/cuda/peer_wait.cuh"

namespace fathom::cuda {

// The number of this launch's barrier. Called after wait_for_earlier_launches().
__device__ inline uint32_t next_barrier(const PeerRank& peers) { return peers.barrier[0] + 1; }

// Waits until `peer` has signalled the barrier; one thread.
__device__ inline void wait_for_signal(const PeerRank& peers, int peer, const uint32_t* signal,
                                       uint32_t barrier) {
  uint64_t begin = 0;
  for (uint32_t polls = 1; static_cast<int32_t>(load_acquire_system(signal) - barrier) < 0;
       ++polls) {
    if (polls % kPollsBetweenLooks == 0 && gives_up(peers, peer, begin)) return;
  }
}

// The two halves of begin_together(): tells the others that this rank's earlier launches have
// ended, and waits for theirs to have. Called by all threads of a CTA, of kMostPeers threads or
// more; the first half by one CTA of the launch.
__device__ inline void signal_begin(const PeerRank& peers, uint32_t barrier) {
  const int peer = static_cast<int>(threadIdx.x);
  if (peer >= peers.ranks || peer == peers.rank) return;
  __threadfence_system();  // the earlier launches' results, before the signal
  store_release_system(peers.signals[peer] + peers.rank, barrier);
}
__device__ inline void wait_for_begin(const PeerRank& peers, uint32_t barrier) {
  const int peer = static_cast<int>(threadIdx.x);
  if (peer < peers.ranks && peer != peers.rank) {
    wait_for_signal(peers, peer, peers.signals[peers.rank] + peer, barrier);
  }
  __syncthreads();
}

// Called by all threads of all CTAs, of kMostPeers threads or more.
__device__ inline void begin_together(const PeerRank& peers, uint32_t barrier) {
  if (blockIdx.x == 0) signal_begin(peers, barrier);
  if (!FATHOM_PLANTED(peers, kSkippedBegin)) wait_for_begin(peers, barrier);
}

// Counts a launch's barrier that ends without the other ranks. Called by all threads of all CTAs;
// nothing of the launch follows it.
__device__ inline void end_alone(const PeerRank& peers, uint32_t barrier) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence();
  if (atomicAdd(peers.barrier + 1, 1) != gridDim.x - 1) return;
  peers.barrier[0] = barrier;
  peers.barrier[1] = 0;
}

// The same, at the end. Nothing of the launch follows it.
__device__ inline void end_together(const PeerRank& peers, uint32_t barrier) {
  __shared__ bool is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence_system();  // this CTA's writes, before it counts as ended
    is_last = atomicAdd(peers.barrier + 1, 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (!is_last) return;
  const int peer = static_cast<int>(threadIdx.x);
  if (peer < peers.ranks && peer != peers.rank) {
    __threadfence_system();
    store_release_system(peers.signals[peer] + kMostPeers + peers.rank, barrier);
    if (!FATHOM_PLANTED(peers, kSkippedEnd)) {
      wait_for_signal(peers, peer, peers.signals[peers.rank] + kMostPeers + peer, barrier);
    }
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  peers.barrier[0] = barrier;
  peers.barrier[1] = 0;
}

}  // namespace fathom::cuda
