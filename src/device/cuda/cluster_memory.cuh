// Single words in the shared memory of a cluster's other CTAs. Every CTA must have begun before the
// first access (cluster_arrive() at its start, cluster_wait() before), and none may end before the
// last.
#pragma once

#include <cstdint>

#include "device/cuda/cluster.cuh"

namespace fathom::cuda {

// %cluster_nctarank
__device__ inline uint32_t cluster_blocks() {
  uint32_t count;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(count));
  return count;
}

// st.shared::cluster, to an address of address_in_block().
__device__ inline void store_word_in_block(uint32_t to, float value) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(to), "f"(value) : "memory");
}
__device__ inline void store_word_in_block(uint32_t to, uint64_t value) {
  asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(to), "l"(value) : "memory");
}

}  // namespace fathom::cuda
