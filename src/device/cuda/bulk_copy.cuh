// PTX for bulk copies of contiguous bytes into shared memory.
#pragma once

#include <cstdint>

#include "device/cuda/ptx.cuh"

namespace fathom::cuda {

// cp.async.bulk: `bytes` contiguous bytes, a multiple of 16.
__device__ inline void copy_bytes_under(uint64_t policy, void* to, const void* from, int bytes,
                                        uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1], %2, [%3], %4;" ::"r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

}  // namespace fathom::cuda
