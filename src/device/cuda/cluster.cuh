// PTX for the CTAs of a cluster, which can write into one another's shared memory (DSMEM).
#pragma once

#include <cstdint>

#include "device/cuda/ptx.cuh"

namespace fathom::cuda {

// %cluster_ctarank
__device__ inline uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// barrier.cluster.arrive, .wait: every thread of every CTA.
__device__ inline void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ inline void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// mapa: the address in CTA `rank` that corresponds to this address of shared memory.
__device__ inline uint32_t address_in_block(uint32_t address, uint32_t rank) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

// mbarrier.arrive at a CTA's barrier, by its address_in_block(), for a thread that has only read:
// the release covers its own CTA alone. At cluster scope each arrival waits until all of the
// thread's writes are visible everywhere.
__device__ inline void barrier_give_back_in_block(uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cta.shared::cluster.b64 _, [%0];" ::"r"(barrier)
               : "memory");
}

// ld.shared::cluster
__device__ inline float4 load_from_block(uint32_t address) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// st.async: stores 16 bytes into another CTA's shared memory, counted by its mbarrier like a copy.
__device__ inline void store_in_block(uint32_t to, uint32_t barrier, float4 v) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, "
      "[%5];" ::"r"(to),
      "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier)
      : "memory");
}
// The same for 4 bytes.
__device__ inline void store_in_block(uint32_t to, uint32_t barrier, uint32_t word) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(to),
      "r"(word), "r"(barrier)
      : "memory");
}

// cp.async.bulk.tensor.2d, multicast: loads the box at column x, row y to this address in each CTA
// of the mask, counted by the mbarrier at this one's address.
__device__ inline void copy_box_to_blocks(uint16_t blocks, void* to, const CUtensorMap* map,
                                          uint64_t* barrier, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "h"(blocks)
      : "memory");
}

}  // namespace fathom::cuda
