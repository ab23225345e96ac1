// The PTX instructions of sm_90a without a C++ equivalent, one function each. Source: PTX ISA 9.0;
// a function does what the manual says under the name in its comment.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace fathom::cuda {

__device__ inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// ---- mbarrier: full and empty barriers of TMA pipelines

// mbarrier.init
__device__ inline void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals));
}

// fence.mbarrier_init: makes barrier_init visible to the copy engine.
__device__ inline void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// mbarrier.arrive.expect_tx
__device__ inline void barrier_expect(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
}

// mbarrier.arrive
__device__ inline void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// mbarrier.arrive with a count.
__device__ inline void barrier_arrive_for(uint64_t* barrier, int count) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(count)
               : "memory");
}

// mbarrier.try_wait.parity, until the phase of that parity has ended.
__device__ inline void barrier_wait(uint64_t* barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain_%=:\n"
      "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@!done bra again_%=;\n}" ::"r"(
          shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// mbarrier.try_wait.parity once: whether the phase of that parity has ended. Other instructions run
// until the result is used.
__device__ inline bool barrier_has_ended(uint64_t* barrier, int parity) {
  uint32_t ended;
  asm volatile(
      "{\n.reg .pred done;\nmbarrier.try_wait.parity.shared.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n}"
      : "=r"(ended)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return ended != 0;
}

// elect.sync: true for one lane of a converged warp, always the same. The compiler knows that it is
// one: copies need no loop over lanes with divergent operands, as they do where a lane is chosen by
// its index.
__device__ inline bool elect_one() {
  uint32_t elected;
  asm volatile(
      "{\n.reg .pred elected;\nelect.sync _|elected, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, elected;\n}"
      : "=r"(elected));
  return elected != 0;
}

// bar.sync: the CTA's named barrier `id`, for `threads` of its threads.
__device__ inline void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// bar.arrive: arrives without waiting.
__device__ inline void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// st.release.cta, ld.acquire.cta: a word in shared memory.
__device__ inline void store_release_in_block(uint32_t* to, uint32_t value) {
  asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"(shared_address(to)), "r"(value)
               : "memory");
}
__device__ inline uint32_t load_acquire_in_block(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.acquire.cta.shared.u32 %0, [%1];"
               : "=r"(value)
               : "r"(shared_address(from))
               : "memory");
  return value;
}

// ---- loads

// cp.async.bulk.tensor.2d: the box at column x, row y.
__device__ inline void copy_box(void* to, const CUtensorMap* map, uint64_t* barrier, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%3, %4}], [%2];" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y)
      : "memory");
}

// The same with three to five coordinates, the innermost first.
__device__ inline void copy_box(void* to, const CUtensorMap* map, uint64_t* barrier, int x, int y,
                                int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%3, %4, %5}], [%2];" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z)
      : "memory");
}
__device__ inline void copy_box(void* to, const CUtensorMap* map, uint64_t* barrier, int x, int y,
                                int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}
__device__ inline void copy_box(void* to, const CUtensorMap* map, uint64_t* barrier, int x, int y,
                                int z, int w, int v) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v)
      : "memory");
}

// createpolicy.fractional: evict-first in L2. For weights, which a step reads once, so that
// activations passed between launches stay in L2.
__device__ inline uint64_t read_once_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// The L2's default policy.
__device__ inline uint64_t keep_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// copy_box() of three to five coordinates, under a policy.
__device__ inline void copy_box_under(uint64_t policy, void* to, const CUtensorMap* map,
                                      uint64_t* barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "l"(policy)
      : "memory");
}
__device__ inline void copy_box_under(uint64_t policy, void* to, const CUtensorMap* map,
                                      uint64_t* barrier, int x, int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "r"(w), "l"(policy)
      : "memory");
}
__device__ inline void copy_box_under(uint64_t policy, void* to, const CUtensorMap* map,
                                      uint64_t* barrier, int x, int y, int z, int w, int v) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v), "l"(policy)
      : "memory");
}
// cp.async.bulk.prefetch.tensor.3d: prefetches the box into L2.
__device__ inline void fetch_box(const CUtensorMap* map, int x, int y, int z) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(map),
               "r"(x), "r"(y), "r"(z)
               : "memory");
}
// prefetch.tensormap
__device__ inline void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// cp.async.cg, 16 bytes
__device__ inline void copy_16(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// cp.async.ca, 4 bytes
__device__ inline void copy_4(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

// copy_16() of the first `bytes`, 0 to 16, zero-filled.
__device__ inline void copy_16_or_zero(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}

// cp.async.mbarrier.arrive.noinc: arrives when this thread's copies so far have completed.
__device__ inline void barrier_arrive_after_copies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// cp.async.wait_all
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// fence.proxy.async: makes ordinary writes to shared memory visible to tensor cores and the copy
// engine.
__device__ inline void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- programmatic dependent launch

// griddepcontrol.wait: returns when earlier launches have ended and their writes are visible.
__device__ inline void wait_for_earlier_launches() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// griddepcontrol.launch_dependents
__device__ inline void let_next_launch_begin() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// setmaxnreg: sets the registers per thread of a warpgroup.
template <int kRegisters>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- tensor cores

// wgmma.fence, .commit_group, .wait_group: waits until at most kPending groups are in flight.
__device__ inline void mma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void mma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending = 0>
__device__ inline void mma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Matrix descriptor of shared memory with the 128-byte swizzle: groups of 8 rows of 128 bytes,
// `stride` bytes apart. "Matrix-descriptor format" under wgmma.
__device__ inline uint64_t swizzled_matrix(uint32_t address, int stride) {
  constexpr uint64_t kSwizzle128 = 1ull << 62;
  constexpr uint64_t kLeading = 1ull << 16;  // not used with a swizzle
  return (address & 0x3FFFF) >> 4 | kLeading | static_cast<uint64_t>(stride >> 4) << 32 |
         kSwizzle128;
}

// stmatrix.x4.trans: four 8 x 8 matrices of bf16, transposed; lane l gives the address of row l % 8
// of matrix l / 8.
__device__ inline void store_matrices_transposed(uint32_t address, uint32_t a, uint32_t b,
                                                 uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// ---- numbers

// cvt.rn.bf16x2: `low` in the lower half.
__device__ inline uint32_t pack_bf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// cvt.rn.f16x2: `low` in the lower half.
__device__ inline uint32_t pack_f16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// ex2.approx.ftz: 2^x, two units in the last place.
__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// lg2.approx.ftz and rcp.approx.ftz: errors of 2^-22 and of one unit in the last place.
__device__ inline float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ---- words shared between CTAs of a launch (relaxed, device scope)

__device__ inline void store_shared_word(float* p, float a) {
  asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(p), "f"(a) : "memory");
}
// The same, predicated instead of branching.
__device__ inline void store_shared_word_if(bool wanted, float* p, float a) {
  asm volatile(
      "{\n.reg .pred wanted;\nsetp.ne.b32 wanted, %2, 0;\n"
      "@wanted st.relaxed.gpu.global.f32 [%0], %1;\n}" ::"l"(p),
      "f"(a), "r"(static_cast<int>(wanted))
      : "memory");
}
__device__ inline void store_shared_words(float* p, float4 v) {
  asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(p), "f"(v.x), "f"(v.y),
               "f"(v.z), "f"(v.w)
               : "memory");
}
// atom.add.release: a thread that acquires the new value sees this thread's earlier writes.
__device__ inline uint64_t add_release(uint64_t* p, uint64_t value) {
  uint64_t before;
  asm volatile("atom.add.release.gpu.global.u64 %0, [%1], %2;"
               : "=l"(before)
               : "l"(p), "l"(value)
               : "memory");
  return before;
}
// ld.acquire
__device__ inline uint64_t load_acquire(const uint64_t* p) {
  uint64_t value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(p) : "memory");
  return value;
}

// ld.relaxed.sys, st.relaxed.sys: a word that the host and other devices see.
__device__ inline uint32_t load_system_word(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
__device__ inline void store_system_word(uint32_t* to, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

// ld.acquire.sys, st.release.sys: a word by which another device tells that its writes are there.
__device__ inline uint32_t load_acquire_system(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
__device__ inline void store_release_system(uint32_t* to, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

// %globaltimer, in ns.
__device__ inline uint64_t global_nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}
__device__ inline float load_shared_word(const float* p) {
  float v;
  asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
  return v;
}
__device__ inline float4 load_shared_words4(const float* p) {
  float4 v;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

}  // namespace fathom::cuda
