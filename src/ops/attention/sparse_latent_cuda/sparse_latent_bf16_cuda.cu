// What: sparse_latent_attention() over a bf16 cache.
//
// Inputs/outputs: sparse_latent_attention_cuda.h.
//
// Layout: shared memory and consumer warpgroups are those of latent_decode_rows_cuda.cu: one CTA
// per SM computes 64 heads of a row, two keys' tiles of 64 in shared memory. A tile's keys come
// from anywhere in the cache, so TMA boxes of 64 rows do not serve: a producer warpgroup copies 16
// bytes a thread and puts them where the 128-byte swizzle wants them.
//
// Algorithm: that of latent_decode_rows_cuda.cu, with the list as the sequence. CTAs are persistent
// and take units of a row and a split (sparse_latent_units_cuda.cuh); the producer goes on to the
// next unit while this one ends. Eight threads copy a key's 128 bytes of a box: one instruction of
// a warp is 4 keys, and a box of 64 keys is 4 instructions of the 4 warps. Positions, then pages,
// are loaded a tile ahead. An mbarrier an arrival counts the threads whose copies have completed.
//
// Determinism: a split is computed by one CTA in one order; splits are combined in order of their
// number by a second launch. Where a split begins depends on split_keys alone.
//
// Limits: 512 + 64 columns of bf16. Fewer than 64 heads take the time of 64.
//
// Source: gather by 16-byte copies with mbarrier arrivals from FlashMLA's sparse prefill (DeepSeek,
// 2025); what latent_decode_rows_cuda.cu names.
//
// Measured: docs/kernels/sparse_latent_attention.md.
#include <cuda_bf16.h>

#include <algorithm>

#include "base/math_constants.h"
#include "device/cuda/launch.h"
#include "device/cuda/ptx.cuh"
#include "device/cuda/tensor_map.h"
#include "ops/attention/latent_decode_cuda/latent_decode_rows_attention_cuda.cuh"
#include "ops/attention/latent_decode_cuda/latent_decode_rows_copies_cuda.cuh"
#include "ops/attention/sparse_latent_cuda/sparse_latent_combine_cuda.cuh"
#include "ops/attention/sparse_latent_cuda/sparse_latent_kernels_cuda.h"
#include "ops/attention/sparse_latent_cuda/sparse_latent_units_cuda.cuh"

namespace fathom::cuda {
namespace {

using latent_rows::Arguments;
using latent_rows::kArrivals;
using latent_rows::kBoxBytes;
using latent_rows::kGroups;
using latent_rows::kGroupThreads;
using latent_rows::kOwnArrivals;
using latent_rows::kRows;
using latent_rows::kStages;
using latent_rows::kThreads;
using latent_rows::Maps;
using latent_rows::SharedMemory;
using sparse_latent::for_each_unit;
using sparse_latent::KeyPlaces;
using sparse_latent::Lists;
using sparse_latent::Unit;

constexpr int kRowBytes = latent_rows::kColumns * 2;
constexpr int kKeyThreads = 8;                                 // that copy a key's 128 bytes
constexpr int kKeysAtOnce = kGroupThreads / kKeyThreads;       // of the warpgroup
constexpr int kKeysEach = sparse_latent::kKeys / kKeysAtOnce;  // of a thread

// ---- producer warpgroup

class ListedCopies {
 public:
  __device__ ListedCopies(SharedMemory& shared, const Maps& maps, const Lists& lists, int rank)
      : shared_(shared), maps_(maps), lists_(lists), rank_(rank) {}

  __device__ void run(const Unit& unit) {
    KeyPlaces<kKeysEach, kKeysAtOnce> places(lists_, unit, thread_ / kKeyThreads, kRowBytes);
    for (int t = 0; t < unit.part.num_tiles; ++t) {
      const std::byte* source[kKeysEach];
      places.next(source);
      if (t % kStages == 0) {
        copy_tile<0>(source, even_tiles_++);
      } else {
        copy_tile<1>(source, odd_tiles_++);
      }
      if (t == 0 && thread_ == 0) copy_queries(shared_, maps_, unit.part, rank_, units_);
    }
    ++units_;
  }

 private:
  // `use`: how many tiles were copied into the stage before.
  template <int kStage>
  __device__ void copy_tile(const std::byte* const (&source)[kKeysEach], int use) {
    const uint32_t to = shared_address(shared_.pages[kStage]) + to_;
    const int chunk = thread_ % kKeyThreads * 16;
#pragma unroll
    for (int arrival = 0; arrival < kArrivals; ++arrival) {
      if (use > 0 && (arrival == 0 || arrival == kOwnArrivals)) {
        barrier_wait(&shared_.read[kStage][arrival == kOwnArrivals], (use - 1) & 1);
      }
#pragma unroll
      for (int i = 0; i < latent_rows::boxes_of(arrival); ++i) {
        const int box = latent_rows::box_of(kStage, arrival, i);
#pragma unroll
        for (int k = 0; k < kKeysEach; ++k) {
          const bool exists = source[k] != nullptr;
          copy_16_or_zero(to + box * kBoxBytes + k * (kKeysAtOnce * 128),
                          (exists ? source[k] : lists_.pages) + box * 128 + chunk, exists ? 16 : 0);
        }
      }
      barrier_arrive_after_copies(&shared_.arrived[kStage][arrival]);
    }
  }

  SharedMemory& shared_;
  const Maps& maps_;
  const Lists& lists_;
  const int rank_, thread_ = threadIdx.x % kGroupThreads;
  // Byte offset of this thread's first 16 bytes in a box.
  const int to_ =
      thread_ / kKeyThreads * 128 + (thread_ % kKeyThreads ^ thread_ / kKeyThreads % 8) * 16;
  int even_tiles_ = 0, odd_tiles_ = 0;  // copied into each stage
  int units_ = 0;
};

// ---- the kernel

template <int kGroup>
__device__ void compute(SharedMemory& shared, const Lists& lists, const Arguments& arguments,
                        int rank) {
  latent_rows::Attention<kGroup, LatentKeys::kListed> attention(shared, arguments, rank);
  for_each_unit(lists, arguments.tile_blocks, [&](const Unit& unit) {
    attention.run(unit.part);
    if (kGroup == 0 && lists.lse != nullptr && unit.part.num_splits == 1) {
      attention.write_lse(lists.lse + int64_t{unit.part.out_row} + rank * kRows,
                          lists.heads - rank * kRows);
    }
  });
}

__global__ void __launch_bounds__(kThreads, 1)
    sparse_latent_bf16_kernel(const __grid_constant__ Maps maps,
                              const __grid_constant__ Lists lists,
                              const __grid_constant__ Arguments arguments) {
  extern __shared__ __align__(1024) uint8_t memory[];
  SharedMemory& shared = *reinterpret_cast<SharedMemory*>(memory);
  // Warp-uniform, and known to be by the compiler.
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const int rank = blockIdx.x % arguments.tile_blocks;
  if (threadIdx.x == 0) {
    constexpr int kWarps = kGroupThreads / 32;
    for (int stage = 0; stage < kStages; ++stage) {
      for (uint64_t& arrived : shared.arrived[stage]) barrier_init(&arrived, kGroupThreads);
      for (uint64_t& read : shared.read[stage]) barrier_init(&read, kWarps);
    }
    for (uint64_t& arrived : shared.queries_arrived) barrier_init(&arrived, 1);
    barrier_init(&shared.queries_read, kWarps * kGroups);
    for (uint64_t& published : shared.published) barrier_init(&published, kGroupThreads);
    barrier_init(&shared.summed, kGroups * kGroupThreads);
    fence_barrier_init();
    prefetch_map(&maps.q_latent);
    prefetch_map(&maps.q_rope);
  }
  let_next_launch_begin();
  __syncthreads();
  wait_for_earlier_launches();

  if (warp >= kGroups * 4) {
    give_registers<56>();
    ListedCopies copies(shared, maps, lists, rank);
    for_each_unit(lists, arguments.tile_blocks, [&](const Unit& unit) { copies.run(unit); });
    wait_for_copies();
  } else {
    take_registers<224>();
    if (warp < 4) {
      compute<0>(shared, lists, arguments, rank);
    } else {
      compute<1>(shared, lists, arguments, rank);
    }
  }
}

}  // namespace

void sparse_latent_bf16(int num_multiprocessors, const SparseLatentArguments& arguments,
                        GpuStream stream) {
  const Extent box = {.rows = kRows, .columns = latent_rows::kBoxColumns};
  const int64_t rows = arguments.rows * arguments.heads;
  const Lists lists = sparse_latent::lists_of(arguments);
  const int blocks = (arguments.heads + kRows - 1) / kRows;
  Arguments inner = {};
  inner.out = static_cast<__nv_bfloat16*>(arguments.out);
  inner.heads = arguments.heads;
  inner.tile_blocks = blocks;
  inner.scale_log2 = arguments.softmax_scale * kLog2E;
  const auto scratch = sparse_latent::scratch_of(lists, blocks, arguments.scratch);
  inner.sums = scratch.sums;
  inner.weights = scratch.weights;
  const Maps maps = {
      bf16_map(arguments.q_latent, {.rows = rows, .columns = latent_rows::kLatent}, box),
      bf16_map(arguments.q_rope, {.rows = rows, .columns = latent_rows::kRope}, box),
      {}};
  const int64_t most = std::max(num_multiprocessors / blocks, 1);
  constexpr int kBytes = sizeof(SharedMemory);
  stream.device().allow_shared_memory(sparse_latent_bf16_kernel, kBytes);
  launch(sparse_latent_bf16_kernel,
         {.blocks = static_cast<unsigned>(std::min(sparse_latent::units_of(lists), most) * blocks),
          .threads = kThreads,
          .shared_bytes = kBytes},
         stream, maps, lists, inner);
  if (lists.splits > 1) {
    sparse_latent::combine_splits<latent_rows::ShareLayout>(
        lists, {.sums = inner.sums, .weights = inner.weights, .out = inner.out, .weight_bias = 0},
        blocks, stream);
  }
}

}  // namespace fathom::cuda
