// Stores of tile kernels' results from registers and shared memory. Source: PTX ISA 9.0; each
// function names its instruction.
#pragma once

#include <cstdint>

#include "device/cuda/ptx.cuh"

namespace fathom::cuda {

// stmatrix.x4: four 8 x 8 matrices of bf16; lane l gives the address of row l % 8 of matrix l / 8.
__device__ inline void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c,
                                      uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// ld.shared.v4
__device__ inline float4 load_shared(uint32_t address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// st.global of one value, whatever its neighbours: a two-value store requires an aligned register
// pair, and the compiler then keeps the values paired wherever else they are used.
__device__ inline void store_alone(float* to, float v) {
  asm volatile("st.global.f32 [%0], %1;" ::"l"(to), "f"(v) : "memory");
}

// cp.async.bulk.tensor.2d, shared to global: stores the box at column x, row y from `from`;
// elements beyond the matrix are not written.
__device__ inline void store_box(const CUtensorMap* map, uint32_t from, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map),
      "r"(x), "r"(y), "r"(from)
      : "memory");
}

// The same with three coordinates, the innermost first.
__device__ inline void store_box(const CUtensorMap* map, uint32_t from, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(map),
      "r"(x), "r"(y), "r"(z), "r"(from)
      : "memory");
}

// cp.async.bulk.commit_group, .wait_group.read: commits a thread's boxes so far as a group; after
// the wait their shared memory can be overwritten.
__device__ inline void commit_boxes() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ inline void wait_until_boxes_are_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// st.shared::cluster.v4, to an address of address_in_block(); visible after the cluster barrier.
__device__ inline void store_in_block(uint32_t to, float4 v) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(to), "f"(v.x), "f"(v.y),
               "f"(v.z), "f"(v.w)
               : "memory");
}

}  // namespace fathom::cuda
