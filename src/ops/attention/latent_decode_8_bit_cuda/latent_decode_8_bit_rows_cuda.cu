// What: latent_decode() for row tiles of 64 and 128 query rows over an 8-bit cache: e4m3 with fp32
// scales for each 128 and a rotary key in bf16, or all of it in e4m3 or e5m2 (cache/latent_row.h).
//
// Inputs/outputs: latent_decode_cuda.h. Splits: latent_decode_plan.h.
//
// Layout: one CTA per SM computes 64 rows; two CTAs compute a tile of 128 rows at the same time, so
// that the second one finds its pages in the L2. Two consumer warpgroups, one producer warp. Three
// pages lie in shared memory as they lie in the cache (PageLayout), beside the queries in f16 and
// the probabilities of an even and an odd page. Each warpgroup has 256 of the output's 512 columns
// in registers.
//
// Algorithm: the cache is A, the rows are N of wgmma, with A from registers: ldmatrix loads bytes,
// one conversion upconverts two of them to f16. A warpgroup computes scores^T [keys, rows] = page
// q^T and probabilities of every second page; both multiply every page: out^T [512, rows] +=
// latent^T probabilities^T, each its columns. In a page's turn a warpgroup multiplies its keys, the
// values of the page before, whose probabilities the other one has computed meanwhile, and its own
// page's values.
// Probabilities are relative to a row's reference, about its largest score so far. The reference is
// raised only when a score exceeds it by more than 2^kSlack, which a vote detects.
// The splits of a row tile are combined within the launch: latent_decode_join_cuda.cuh.
//
// Numbers: one power of two scales all queries of a CTA. e4m3 and e5m2 are exact in f16; with a
// scale the product is rounded to f16 (11 bits), the scale before. Probabilities are f16. Scales
// above kMostScale, whose products exceed f16, are divided by powers of two. For scores the divisor
// covers the 16 keys of a warp and is multiplied back; for values it covers the split so far, and
// the sums are relative to it as they are to the rows' references.
//
// Determinism: a split is computed by one CTA in one order, splits are combined in order of their
// number; no atomics. Bits depend on the plan, so on the lengths in the batch.
//
// Limits: 512 + 64 columns. Fewer than 64 rows take the time of 64.
//
// Source: as latent_decode_rows_cuda.cu.
//
// Measured: docs/kernels/latent_decode_8_bit_rows.md.
#include "cache/latent_row_cuda.cuh"
#include "device/cuda/co_resident.h"
#include "device/cuda/ptx.cuh"
#include "ops/attention/latent_decode_8_bit_cuda/latent_decode_8_bit_copies_cuda.cuh"
#include "ops/attention/latent_decode_8_bit_cuda/latent_decode_8_bit_results_cuda.cuh"
#include "ops/attention/latent_decode_8_bit_cuda/latent_decode_8_bit_rows_attention_cuda.cuh"
#include "ops/attention/latent_decode_8_bit_cuda/latent_decode_8_bit_rows_cuda.h"
#include "ops/attention/latent_decode_cuda/latent_decode_join_cuda.cuh"

namespace fathom::cuda {
namespace {

using namespace latent_8_bit;

// ---- the kernel

template <typename Row>
__global__ void __launch_bounds__(kThreads, 1)
    latent_decode_8_bit_rows_kernel(const __grid_constant__ CUtensorMap map,
                                    const __grid_constant__ Arguments arguments) {
  using Shared = RowsSharedMemory<Row>;
  using Joining = JoinedShare<SumsLayout<kBlockRows>>;
  static_assert(sizeof(Shared) <= kMostShared &&
                sizeof(typename Joining::Memory) <= sizeof(Shared::pages));
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const int blocks = arguments.tile_blocks, rank = static_cast<int>(blockIdx.x) % blocks;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Shared::kStages; ++stage) {
      barrier_init(&shared.arrived[stage], 1);
      barrier_init(&shared.read[stage], kWarps);
    }
    for (uint64_t& published : shared.published) barrier_init(&published, kGroupThreads);
    fence_barrier_init();
  }
  let_next_launch_begin();
  __syncthreads();
  const int first_part = __shfl_sync(~0u, arguments.first_part[blockIdx.x / blocks], 0);

  if (warp >= kWarps) {
    give_registers<24>();
    if (warp == kWarps) issue_pages<Row>(shared, map, arguments, first_part);
  } else {
    take_registers<240>();
    {
      RowsAttention<Row> attention(shared, arguments, rank);
      for (int p = first_part, more = 1; more; ++p) {
        const LatentDecodePart& part = arguments.parts[p];
        more = __shfl_sync(~0u, part.more, 0);
        attention.run(part);
      }
    }
    named_barrier(kBarrier, kComputing);  // the pages' memory is free
    for (int p = first_part, more = 1; more; ++p) {
      const LatentDecodePart part = arguments.parts[p];
      more = part.more;
      if (part.num_splits == 1) continue;
      const int64_t first_slot = int64_t{part.first_slot} * blocks + rank;
      const int64_t first_weight =
          (int64_t{part.first_weight} + part.split * part.num_splits) * blocks + rank;
      Joining(part, part.rows - rank * kBlockRows,
              arguments.sums + first_slot * (4 * Joining::kVectors), Joining::kVectors * blocks,
              arguments.weights + first_weight * kBlockRows, kBlockRows * blocks,
              arguments.out + (int64_t{part.out_row} + rank * kBlockRows) * kLatent,
              reinterpret_cast<typename Joining::Memory&>(shared.pages))
          .run();
      named_barrier(kBarrier, kComputing);
    }
  }
}

}  // namespace

void latent_decode_8_bit_rows(int tile_rows, int num_multiprocessors,
                              const LatentDecodeArguments& arguments, GpuStream stream) {
  Arguments inner = kernel_arguments(num_multiprocessors, arguments);
  inner.tile_blocks = tile_rows / kBlockRows;
  with_latent_row(arguments.format, [&]<typename Row>(Row) {
    if constexpr (!Row::kIsBf16) {
      const auto kernel = latent_decode_8_bit_rows_kernel<Row>;
      constexpr int kBytes = sizeof(RowsSharedMemory<Row>);
      stream.device().allow_shared_memory(kernel, kBytes);
      launch_co_resident("latent_decode_8_bit_rows", kernel,
                         {.blocks = static_cast<unsigned>(num_multiprocessors / inner.tile_blocks *
                                                          inner.tile_blocks),
                          .threads = kThreads,
                          .shared_bytes = kBytes},
                         num_multiprocessors, stream, map_of_pages<Row>(arguments), inner);
    }
  });
}

}  // namespace fathom::cuda
