// Loads of tiles of any type into shared memory and from there into registers. Source: PTX ISA 9.0;
// each function names its instruction.
#pragma once

#include <cstdint>

#include "device/cuda/ptx.cuh"

namespace fathom::cuda {

// cp.async.bulk: `bytes` contiguous bytes, a multiple of 16.
__device__ inline void copy_bytes(void* to, const void* from, int bytes, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

// cp.async.bulk.prefetch.L2: prefetches `bytes`, a multiple of 16, into L2.
__device__ inline void prefetch_bytes(const void* from, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// ldmatrix.x4: four 8 x 8 matrices of 16 bits; lane l gives the address of row l % 8 of matrix l /
// 8 and gets elements 2 (l % 4) and the next of row l / 4 of each.
__device__ inline void load_matrices(uint32_t (&m)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}

// The same with .trans: a lane gets elements l / 4 of the rows 2 (l % 4) and the next.
__device__ inline void load_matrices_transposed(uint32_t (&m)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}

}  // namespace fathom::cuda
