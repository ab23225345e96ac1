// What: sparse_latent_attention() over an 8-bit cache: e4m3 with fp32 scales for each 128 and a
// rotary key in bf16, or all of it in e4m3 or e5m2 (cache/latent_row.h).
//
// Inputs/outputs: sparse_latent_attention_cuda.h.
//
// Layout: shared memory and consumer warpgroups are those of latent_decode_8_bit_rows_cuda.cu: one
// CTA per SM computes 64 heads of a row; three tiles of 64 keys lie in shared memory as they lie in
// the cache, a key at an odd stride of 16 bytes. A key's row is contiguous: one bulk copy each, by
// four producer warps. The lanes of a warp issue bulk copies one after the other: one warp for
// all of a tile's keys was slower than the tensor cores.
//
// Algorithm: that of latent_decode_8_bit_rows_cuda.cu, with the list as the sequence. Bytes are
// dequantized on their way from shared memory to the tensor cores, so no dequantized value is
// stored. A CTA has one unit of a row and a split (sparse_latent_units_cuda.cuh): in a loop over
// units nvcc 13.0 moved descriptors and addresses before it and spilled 450 bytes of them.
//
// Determinism: as sparse_latent_bf16_cuda.cu. One power of two scales the queries of a CTA, which
// are heads of one row.
//
// Limits: 512 + 64 columns. Fewer than 64 heads take the time of 64.
//
// Source: as latent_decode_8_bit_rows_cuda.cu.
//
// Measured: docs/kernels/sparse_latent_attention.md.
#include <cuda_bf16.h>

#include "base/math_constants.h"
#include "cache/latent_row_cuda.cuh"
#include "device/cuda/launch.h"
#include "device/cuda/ptx.cuh"
#include "device/cuda/tile_load.cuh"
#include "ops/attention/latent_decode_8_bit_cuda/latent_decode_8_bit_results_cuda.cuh"
#include "ops/attention/latent_decode_8_bit_cuda/latent_decode_8_bit_rows_attention_cuda.cuh"
#include "ops/attention/sparse_latent_cuda/sparse_latent_combine_cuda.cuh"
#include "ops/attention/sparse_latent_cuda/sparse_latent_kernels_cuda.h"
#include "ops/attention/sparse_latent_cuda/sparse_latent_units_cuda.cuh"

namespace fathom::cuda {
namespace {

using latent_8_bit::Arguments;
using latent_8_bit::kBlockRows;
using latent_8_bit::kThreads;
using latent_8_bit::kWarps;
using latent_8_bit::RowsAttention;
using latent_8_bit::RowsSharedMemory;
using sparse_latent::for_own_unit;
using sparse_latent::KeyPlaces;
using sparse_latent::Lists;
using sparse_latent::Unit;

// ---- producer warps

constexpr int kProducers = kThreads / 32 - kWarps;
constexpr int kKeysEach = sparse_latent::kKeys / kProducers;  // of a tile, a warp: a lane each

template <typename Row>
class ListedCopies {
 public:
  using Shared = RowsSharedMemory<Row, LatentKeys::kListed>;

  __device__ ListedCopies(Shared& shared, const Lists& lists) : shared_(shared), lists_(lists) {}

  __device__ void run(const Unit& unit) {
    KeyPlaces<1, 1> places(lists_, unit, first_ + lane_, Row::kBytes);
    for (int t = 0; t < unit.part.num_tiles; ++t, ++turn_) {
      const std::byte* source[1];
      places.next(source);
      copy_keys(source[0], unit.part.kv_len - t * sparse_latent::kKeys - first_);
    }
  }

 private:
  // `keys`: how many of the list are left from this warp's first one on.
  __device__ void copy_keys(const std::byte* source, int keys) {
    const int stage = turn_ % Shared::kStages;
    uint64_t* const arrived = &shared_.arrived[stage];
    if (turn_ >= Shared::kStages) {
      barrier_wait(&shared_.read[stage], (turn_ / Shared::kStages - 1) & 1);
    }
    if (lane_ == 0) barrier_expect(arrived, max(0, min(keys, kKeysEach)) * Row::kBytes);
    __syncwarp();
    if (lane_ < kKeysEach && source != nullptr) {
      copy_bytes(shared_.pages[stage] + Shared::Page::at(first_ + lane_, 0), source, Row::kBytes,
                 arrived);
    }
  }

  Shared& shared_;
  const Lists& lists_;
  const int lane_ = threadIdx.x % 32;
  const int first_ = (static_cast<int>(threadIdx.x) / 32 - kWarps) * kKeysEach;
  int turn_ = 0;  // tiles since the launch
};

// ---- the kernel

template <typename Row>
__global__ void __launch_bounds__(kThreads, 1)
    sparse_latent_8_bit_kernel(const __grid_constant__ Lists lists,
                               const __grid_constant__ Arguments arguments) {
  using Shared = RowsSharedMemory<Row, LatentKeys::kListed>;
  static_assert(sizeof(Shared) <= latent_8_bit::kMostShared);
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const int blocks = arguments.tile_blocks, rank = static_cast<int>(blockIdx.x) % blocks;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Shared::kStages; ++stage) {
      barrier_init(&shared.arrived[stage], kProducers);
      barrier_init(&shared.read[stage], kWarps);
    }
    for (uint64_t& published : shared.published) {
      barrier_init(&published, latent_8_bit::kGroupThreads);
    }
    fence_barrier_init();
  }
  let_next_launch_begin();
  __syncthreads();
  wait_for_earlier_launches();

  if (warp >= kWarps) {
    give_registers<24>();
    ListedCopies<Row> copies(shared, lists);
    for_own_unit(lists, blocks, [&](const Unit& unit) { copies.run(unit); });
  } else {
    take_registers<240>();
    RowsAttention<Row, LatentKeys::kListed> attention(shared, arguments, rank);
    for_own_unit(lists, blocks, [&](const Unit& unit) {
      attention.run(unit.part);
      if (lists.lse != nullptr && unit.part.num_splits == 1) {
        attention.write_lse(lists.lse + int64_t{unit.part.out_row} + rank * kBlockRows,
                            lists.heads - rank * kBlockRows);
      }
    });
  }
}

}  // namespace

void sparse_latent_8_bit(const SparseLatentArguments& arguments, GpuStream stream) {
  const Lists lists = sparse_latent::lists_of(arguments);
  const int blocks = (arguments.heads + kBlockRows - 1) / kBlockRows;
  const auto scratch = sparse_latent::scratch_of(lists, blocks, arguments.scratch);
  Arguments inner = {};
  inner.q_latent = static_cast<const __nv_bfloat16*>(arguments.q_latent);
  inner.q_rope = static_cast<const __nv_bfloat16*>(arguments.q_rope);
  inner.out = static_cast<__nv_bfloat16*>(arguments.out);
  inner.sums = scratch.sums;
  inner.weights = scratch.weights;
  inner.heads = arguments.heads;
  inner.tile_blocks = blocks;
  inner.scale_log2 = arguments.softmax_scale * kLog2E;
  with_latent_row(arguments.format, [&]<typename Row>(Row) {
    if constexpr (!Row::kIsBf16) {
      const auto kernel = sparse_latent_8_bit_kernel<Row>;
      constexpr int kBytes = sizeof(RowsSharedMemory<Row, LatentKeys::kListed>);
      stream.device().allow_shared_memory(kernel, kBytes);
      launch(kernel,
             {.blocks = static_cast<unsigned>(sparse_latent::units_of(lists) * blocks),
              .threads = kThreads,
              .shared_bytes = kBytes},
             stream, lists, inner);
    }
  });
  if (lists.splits > 1) {
    sparse_latent::combine_splits<latent_8_bit::SumsLayout<kBlockRows>>(
        lists,
        {.sums = inner.sums,
         .weights = inner.weights,
         .out = inner.out,
         .weight_bias = latent_8_bit::kBias},
        blocks, stream);
  }
}

}  // namespace fathom::cuda
