// What: latent_decode() for row tiles of 64 and 128 query rows: 64 and 128 heads, or fewer heads of
// several tokens.
//
// Inputs/outputs: latent_decode_cuda.h. Splits: latent_decode_plan.h.
//
// Layout: one CTA per SM computes 64 rows; two CTAs compute a tile of 128 rows at the same time, so
// that the second one finds its pages in the L2. Shared memory has boxes of 64 rows (or keys) x 64
// columns (8 KB, 128-byte swizzle): the queries (9 boxes, the last of them rotary), two pages (9
// boxes each) and one box of probabilities. Each of two consumer warpgroups has 256 of the output's
// 512 columns in registers. One producer warp.
//
// Algorithm: warpgroup 0 computes the scores and probabilities of a split's even pages, warpgroup 1
// those of the odd ones; both multiply every page's probabilities with their half of its values,
// their own ones from registers, the other's from shared memory. The order on the tensor cores is:
// scores of page 0, [values of page 0, scores of 1], [scores of 2, values of 1, values of 2, scores
// of 3], …; one page's softmax overlaps with the other warpgroup's wgmmas, and each half of a page
// is reloaded as soon as its warpgroup has multiplied its values.
// Sums are relative to a reference, about the largest score of the row so far; a page's
// probabilities come with the reference that they are relative to.
// Row tiles with several splits are combined within the launch: latent_decode_join_cuda.cuh.
//
// Determinism: a split is computed by one CTA in one order, splits are combined in order of their
// number; no atomics. Bits depend on the plan, so on the lengths in the batch.
//
// Limits: 512 + 64 columns of bf16. Fewer than 64 rows take the time of 64.
//
// Source: the latent attention of DeepSeek-V2 (2024), section 2.1; one output over two warpgroups,
// which take turns at scores and exchange probabilities, from FlashMLA's description of its
// schedule (DeepSeek, 2025); lazy rescaling from FlashAttention-4 (Dao et al., 2025).
//
// Measured: docs/kernels/latent_decode_rows.md.
#include <cuda_bf16.h>

#include "base/math_constants.h"
#include "device/cuda/co_resident.h"
#include "device/cuda/ptx.cuh"
#include "device/cuda/tensor_map.h"
#include "ops/attention/latent_decode_cuda/latent_decode_join_cuda.cuh"
#include "ops/attention/latent_decode_cuda/latent_decode_rows_attention_cuda.cuh"
#include "ops/attention/latent_decode_cuda/latent_decode_rows_copies_cuda.cuh"
#include "ops/attention/latent_decode_cuda/latent_decode_rows_cuda.h"

namespace fathom::cuda {
namespace {

using namespace latent_rows;

// ---- the kernel

template <typename Role>
__device__ void for_each_part(const LatentDecodePart* parts, Role&& role) {
  for (bool more = true; more; ++parts) {
    const LatentDecodePart& part = *parts;
    more = __shfl_sync(~0u, part.more, 0) != 0;
    role(part);
  }
}

__device__ void join(const LatentDecodePart& part, const Arguments& arguments, int rank,
                     SharedMemory& shared) {
  using Joining = JoinedShare<ShareLayout>;
  static_assert(sizeof(Joining::Memory) <= sizeof(shared.pages));
  const int blocks = arguments.tile_blocks;
  const int64_t first_slot = int64_t{part.first_slot} * blocks + rank;
  const int64_t first_weight =
      (int64_t{part.first_weight} + part.split * part.num_splits) * blocks + rank;
  Joining(part, part.rows - rank * kRows, arguments.sums + first_slot * (4 * Joining::kVectors),
          Joining::kVectors * blocks, arguments.weights + first_weight * kRows, kRows * blocks,
          arguments.out + (int64_t{part.out_row} + rank * kRows) * kLatent,
          reinterpret_cast<Joining::Memory&>(shared.pages))
      .run();
}

__global__ void __launch_bounds__(kThreads, 1)
    latent_decode_rows_kernel(const __grid_constant__ Maps maps,
                              const __grid_constant__ Arguments arguments) {
  extern __shared__ __align__(1024) uint8_t memory[];
  SharedMemory& shared = *reinterpret_cast<SharedMemory*>(memory);
  // Warp-uniform, and known to be by the compiler.
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const int rank = blockIdx.x % arguments.tile_blocks;
  if (threadIdx.x == 0) {
    constexpr int kWarps = kGroupThreads / 32;
    for (int stage = 0; stage < kStages; ++stage) {
      for (uint64_t& arrived : shared.arrived[stage]) barrier_init(&arrived, 1);
      for (uint64_t& read : shared.read[stage]) barrier_init(&read, kWarps);
    }
    for (uint64_t& arrived : shared.queries_arrived) barrier_init(&arrived, 1);
    barrier_init(&shared.queries_read, kWarps * kGroups);
    for (uint64_t& published : shared.published) barrier_init(&published, kGroupThreads);
    for (uint64_t& cleared : shared.cleared) barrier_init(&cleared, kGroupThreads);
    barrier_init(&shared.summed, kGroups * kGroupThreads);
    fence_barrier_init();
    prefetch_map(&maps.q_latent);
    prefetch_map(&maps.q_rope);
    prefetch_map(&maps.pages);
  }
  let_next_launch_begin();
  __syncthreads();
  // Splits are written by no launch, so they are read before the PDL wait.
  const LatentDecodePart* const parts =
      arguments.parts +
      __shfl_sync(~0u, arguments.first_part[blockIdx.x / arguments.tile_blocks], 0);

  if (warp >= kGroups * 4) {
    give_registers<40>();
    if (warp == kGroups * 4) {
      Copies pages(shared, maps, arguments, rank);
      for_each_part(parts, [&](const LatentDecodePart& part) { pages.run(part); });
    }
  } else {
    take_registers<232>();
    wait_for_earlier_launches();
    if (warp < 4) {
      Attention<0> attention(shared, arguments, rank);
      for_each_part(parts, [&](const LatentDecodePart& part) { attention.run(part); });
    } else {
      Attention<1> attention(shared, arguments, rank);
      for_each_part(parts, [&](const LatentDecodePart& part) { attention.run(part); });
    }
    named_barrier(kBothGroups, kGroups * kGroupThreads);  // the pages' memory is free
    for_each_part(parts, [&](const LatentDecodePart& part) {
      if (part.num_splits == 1) return;
      join(part, arguments, rank, shared);
      named_barrier(kBothGroups, kGroups * kGroupThreads);
    });
  }
}

}  // namespace

void latent_decode_rows(int tile_rows, int num_multiprocessors,
                        const LatentDecodeArguments& arguments, GpuStream stream) {
  const Extent box = {.rows = 64, .columns = kBoxColumns};
  const int64_t rows = arguments.rows * arguments.heads;
  Arguments inner;
  inner.block_tables = arguments.block_tables;
  inner.parts = arguments.parts;
  inner.first_part = arguments.first_part;
  inner.out = static_cast<__nv_bfloat16*>(arguments.out);
  inner.sums = arguments.scratch;
  inner.weights = arguments.scratch + latent_decode_scratch(num_multiprocessors).sums;
  inner.heads = arguments.heads;
  inner.scale_log2 = arguments.softmax_scale * kLog2E;
  inner.tile_blocks = tile_rows / kRows;
  const Maps maps = {
      bf16_map(arguments.q_latent, {.rows = rows, .columns = kLatent}, box),
      bf16_map(arguments.q_rope, {.rows = rows, .columns = kRope}, box),
      bf16_map(arguments.pages, {.rows = arguments.num_pages * kKeys, .columns = kColumns}, box)};
  constexpr int kBytes = sizeof(SharedMemory);
  stream.device().allow_shared_memory(latent_decode_rows_kernel, kBytes);
  launch_co_resident(
      "latent_decode_rows", latent_decode_rows_kernel,
      {.blocks = static_cast<unsigned>(num_multiprocessors / inner.tile_blocks * inner.tile_blocks),
       .threads = kThreads,
       .shared_bytes = kBytes},
      num_multiprocessors, stream, maps, inner);
}

}  // namespace fathom::cuda
