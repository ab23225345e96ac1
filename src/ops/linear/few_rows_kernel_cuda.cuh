// What: skinny GEMM core: up to 64 rows of x (tokens) with all rows of W; bandwidth-bound; in bf16,
// or in e4m3 with block-wise scales (kScaled).
//
// Layout: up to one CTA an SM, with kWarpgroups consumer warpgroups and two producer warps. A ring
// buffer of stages (weight_stream_cuda.cuh), each 256 bytes of kColumns rows of x and of as many
// rows of W as the largest tile has: a fixed stage size would leave few bytes in flight for a small
// matrix. In e4m3 a stage is two k blocks; their token scales arrive with the stage, weight scales
// once a tile.
//
// Algorithm: transposed, so that few rows waste nothing: rows of W are M of the wgmma, rows of x
// its N. A tile of the CTA's rows of W goes through the ring, and its result stays in registers.
// With split-K over the CTAs of a cluster, each CTA owns a share of the tile: it receives the other
// CTAs' partial sums of that share in its shared memory, adds them up and writes the result.
// Weights are loaded before the PDL wait: no launch of this step writes them.
//
// Determinism: a CTA adds in the order of k, k-slices are added in the order of k; no atomics. Bits
// depend on the number of splits, so on the shape and the number of rows; without a split, on k
// alone.
//
// Source: weights on M for few tokens as in TensorRT-LLM's and HPC-Ops' skinny GEMMs; loading
// weights before the PDL wait as in TensorRT-LLM's fused_a kernel.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <type_traits>

#include "device/cuda/cluster.cuh"
#include "device/cuda/gpu_stream.h"
#include "device/cuda/launch.h"
#include "device/cuda/ptx.cuh"
#include "device/cuda/tensor_map.h"
#include "device/cuda/warp_mma.cuh"
#include "ops/linear/few_rows_plan.h"
#include "ops/linear/weight_stream_cuda.cuh"

namespace fathom::cuda::few_rows {

inline constexpr int kWarpgroupThreads = 128;
inline constexpr int kMostShared = 227 * 1024;
inline constexpr int kMaxStages = FewRowsPlan::kMaxStages;

struct Maps {
  CUtensorMap weights[2];  // boxes of as many rows as the largest tile, and of 8 fewer
  CUtensorMap tokens;
  CUtensorMap token_scales;  // e4m3 only
};

struct Arguments {
  void* out;
  int64_t row_stride, batch_stride;
  int32_t rows, n, columns;  // columns: k / 64, in e4m3 k / 128
  int32_t splits, clusters, tiles, tile_groups, stages, exchanges, next_begins_at;
  int32_t fetched;  // stages after the ring, prefetched into L2 during the first wgmmas

  __device__ int token_groups() const { return (rows + kGroupRows - 1) / kGroupRows; }
  // A stage holds tokens first, then weights.
  __device__ int token_bytes() const { return token_groups() * kStageHalves * kGroupBytes; }
  __device__ int stage_bytes() const {
    return token_bytes() + tile_groups * kStageHalves * kGroupBytes;
  }
  bool f32;

  // e4m3 only: weight scales, [n / 128 rounded up, columns]; a stage's token scales and a tile's
  // weight scales in shared memory.
  const float* weight_scales;
  const float* weight_row_scales;  // [n] or null
  __device__ int token_scales() const { return kStageHalves * token_groups() * kGroupRows; }
  int32_t token_scales_stride, tile_scales;
};

template <int kColumns, int kWarpgroups>
struct Layout {
  static constexpr int kThreads = kWarpgroups * kWarpgroupThreads;  // consumers
  static constexpr int kAllThreads = kThreads + 64;                 // and two producer warps
  static constexpr int kTileBytes = kThreads * (kColumns / 2) * 4;  // in fp32
};

struct NoScales {
  template <typename... Any>
  __device__ explicit NoScales(Any&&...) {}
};

// A CTA's share of the work.
struct Share {
  int batch, rank;
  int first_group, num_groups;  // in groups of 8 rows of W
  int first_stage, num_stages;  // along k

  __device__ explicit Share(const Arguments& a) : num_tiles_(a.tiles) {
    const int cluster = blockIdx.x / a.splits % a.clusters;
    batch = blockIdx.x / (a.splits * a.clusters);
    rank = blockIdx.x % a.splits;
    const int64_t groups = a.n / kGroupRows;
    first_group = static_cast<int>(groups * cluster / a.clusters);
    num_groups = static_cast<int>(groups * (cluster + 1) / a.clusters) - first_group;
    const int stages = (a.columns + kStageHalves - 1) / kStageHalves;
    first_stage = stages * rank / a.splits;
    num_stages = stages * (rank + 1) / a.splits - first_stage;
  }
  __device__ int tile_begin(int tile) const { return first_group + num_groups * tile / num_tiles_; }

 private:
  int num_tiles_;
};

// ---- loads

template <bool kScaled>
class Copies {
 public:
  __device__ Copies(uint8_t* ring, float* token_scales, uint64_t* arrived, const Maps& maps,
                    const Share& share, const Arguments& a)
      : ring_(ring),
        token_scales_(token_scales),
        arrived_(arrived),
        maps_(maps),
        share_(share),
        a_(a),
        stage_bytes_(a.stage_bytes()) {}

  // Producer thread: loads all but the first rows of x.
  __device__ void run(uint64_t* read) const {
    const int total = a_.tiles * share_.num_stages, first = min(a_.stages, total);
    for (int i = 0; i < first; ++i) copy_weights(i, i);
    wait_for_earlier_launches();
    for (int i = first; i < min(first + a_.fetched, total); ++i) fetch_weights(i);
    RingPosition at;
    for (int i = first; i < total; ++i) {
      barrier_wait(&read[at.stage], at.parity);
      copy_weights(at.stage, i);
      copy_tokens(at.stage, i);
      at.advance(a_.stages);
      if (i + 1 == a_.next_begins_at) let_next_launch_begin();
    }
  }

  // Loads the tokens of the ring's first fill, from another thread than the weights: the weight
  // thread waits in the copy engine's queue meanwhile.
  __device__ void copy_first_tokens() const {
    const int first = min(a_.stages, a_.tiles * share_.num_stages);
    wait_for_earlier_launches();
    for (int i = 0; i < first; ++i) copy_tokens(i, i);
  }

 private:
  __device__ int column(int i) const {
    return (share_.first_stage + i % share_.num_stages) * kStageHalves;
  }
  // The weights of the CTA's i-th stage: a box of one of the two tensor maps.
  struct Weights {
    const CUtensorMap* map;
    int groups, row, column;
  };
  __device__ Weights weights(int i) const {
    const int tile = i / share_.num_stages;
    const int begin = share_.tile_begin(tile), groups = share_.tile_begin(tile + 1) - begin;
    return {&maps_.weights[groups == a_.tile_groups ? 0 : 1], groups,
            share_.batch * a_.n + begin * kGroupRows, column(i)};
  }
  // Arms the barrier with the stage's bytes, then loads the weights.
  __device__ void copy_weights(int stage, int i) const {
    const Weights box = weights(i);
    barrier_expect(&arrived_[stage], box.groups * (kStageHalves * kGroupBytes) + a_.token_bytes() +
                                         (kScaled ? a_.token_scales() * 4 : 0));
    copy_box_under(policy_, ring_ + stage * stage_bytes_ + a_.token_bytes(), box.map,
                   &arrived_[stage], 0, box.row, box.column);
  }
  __device__ void fetch_weights(int i) const {
    const Weights box = weights(i);
    fetch_box(box.map, 0, box.row, box.column);
  }
  __device__ void copy_tokens(int stage, int i) const {
    copy_box(ring_ + stage * stage_bytes_, &maps_.tokens, &arrived_[stage], 0, 0, column(i),
             share_.batch);
    if constexpr (kScaled) {
      copy_box(token_scales_ + stage * a_.token_scales_stride, &maps_.token_scales,
               &arrived_[stage], 0, column(i));
    }
  }

  uint8_t* const ring_;
  float* const token_scales_;
  uint64_t* const arrived_;
  const Maps& maps_;
  const Share& share_;
  const Arguments& a_;
  const int stage_bytes_;
  const uint64_t policy_ = read_once_policy();
};

// ---- weight scales

// Weight scales of the CTA's k-slice, for the two blocks of 128 rows that a tile may overlap:
// copied while the tile before is multiplied.
template <int kThreads>
class WeightScales {
 public:
  __device__ WeightScales(float* memory, const Share& share, const Arguments& a)
      : memory_(memory), share_(share), a_(a), columns_(share.num_stages * kStageHalves) {
    copy(0);
    wait();
  }

  // Scales of one row of the tile.
  __device__ const float* of(int tile, int row) const {
    return table(tile) + (row / 128 - first_block(tile)) * columns_;
  }
  __device__ void copy(int tile) const {
    if (tile == a_.tiles) return;
    const int first_column = share_.first_stage * kStageHalves, last_block = (a_.n - 1) / 128;
    for (int i = static_cast<int>(threadIdx.x); i < 2 * columns_; i += kThreads) {
      const int block = min(first_block(tile) + i / columns_, last_block);
      const int column = min(first_column + i % columns_, a_.columns - 1);  // beyond it x is 0
      copy_4(shared_address(table(tile) + i), a_.weight_scales + block * a_.columns + column);
    }
  }
  // Waits for all threads' copies.
  __device__ void wait() const {
    wait_for_copies();
    named_barrier(2, kThreads);
  }

 private:
  __device__ float* table(int tile) const { return memory_ + (tile & 1) * a_.tile_scales; }
  __device__ int first_block(int tile) const { return share_.tile_begin(tile) * kGroupRows / 128; }

  float* const memory_;
  const Share& share_;
  const Arguments& a_;
  const int columns_;
};

// ---- results

__device__ inline void write_one(const Arguments& a, int batch, int row, int column, float value) {
  if (row >= a.rows) return;
  const int64_t at = batch * a.batch_stride + row * a.row_stride + column;
  if (a.f32) {
    static_cast<float*>(a.out)[at] = value;
  } else {
    static_cast<__nv_bfloat16*>(a.out)[at] = __float2bfloat16(value);
  }
}

// Writes four values of a thread: rows (tokens) `row` and `row + 1` at columns `column` and `column
// + 8`, as far as they are below `end`.
__device__ inline void write_four(const Arguments& a, int batch, int row, int column, int end,
                                  float4 v) {
  if (column < end) {
    write_one(a, batch, row, column, v.x);
    write_one(a, batch, row + 1, column, v.y);
  }
  if (column + 8 < end) {
    write_one(a, batch, row, column + 8, v.z);
    write_one(a, batch, row + 1, column + 8, v.w);
  }
}

// Writes a whole warp's values in bf16: transposed, so that four lanes write 16 bytes of a row.
// `column` is the first lane's, `row` its first.
__device__ inline void write_warp(const Arguments& a, int batch, int row, int column, int end,
                                  float4 v) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const uint32_t low = transposed(pack_bf16(v.x, v.y)), high = transposed(pack_bf16(v.z, v.w));
  row += lane / 4;
  if (row >= a.rows) return;
  auto* to = static_cast<__nv_bfloat16*>(a.out) + batch * a.batch_stride + row * a.row_stride +
             column + 2 * (lane % 4);
  if (column < end) *reinterpret_cast<uint32_t*>(to) = low;
  if (column + 8 < end) *reinterpret_cast<uint32_t*>(to + 8) = high;
}

// ---- the kernel

// Two launches' CTAs share an SM's registers as they do its shared memory.
template <int kColumns, int kWarpgroups, bool kScaled>
__global__ void __launch_bounds__(Layout<kColumns, kWarpgroups>::kAllThreads,
                                  kColumns <= 32 ? 2 : 1)
    few_rows_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Arguments a) {
  using L = Layout<kColumns, kWarpgroups>;
  extern __shared__ __align__(1024) uint8_t memory[];
  uint8_t* const exchange = memory + a.stages * a.stage_bytes();
  auto* const token_scales = reinterpret_cast<float*>(exchange + a.exchanges * L::kTileBytes);
  float* const tile_scales = token_scales + (kScaled ? a.stages * a.token_scales_stride : 0);
  auto* const arrived =
      reinterpret_cast<uint64_t*>(tile_scales + (kScaled ? 2 * a.tile_scales : 0));
  uint64_t* const read = arrived + kMaxStages;
  uint64_t* const joined = read + kMaxStages;  // [2]

  if (threadIdx.x == 0) {
    prefetch_map(&maps.tokens);  // the first map used after the PDL wait
    if constexpr (kScaled) prefetch_map(&maps.token_scales);
    for (int i = 0; i < a.stages; ++i) {
      barrier_init(&arrived[i], 1);
      barrier_init(&read[i], kWarpgroups * 4);
    }
    for (int i = 0; i < 2; ++i) barrier_init(&joined[i], 1);
    fence_barrier_init();
    for (int i = 0; i < a.exchanges; ++i) barrier_expect(&joined[i], L::kTileBytes);
    if (a.next_begins_at == 0) let_next_launch_begin();
  }
  __syncthreads();
  if (a.splits > 1) cluster_arrive();
  const Share share(a);

  if (threadIdx.x >= L::kThreads) {
    const Copies<kScaled> copies(memory, token_scales, arrived, maps, share, a);
    if (threadIdx.x == L::kThreads) copies.run(read);
    if (threadIdx.x == L::kThreads + 32) copies.copy_first_tokens();
    __syncwarp();
    if (a.splits > 1) cluster_wait();
    return;
  }
  if (a.splits > 1) cluster_wait();  // the other CTAs' barriers exist
  [[maybe_unused]] std::conditional_t<kScaled, WeightScales<L::kThreads>, NoScales> weight_scales(
      tile_scales, share, a);
  wait_for_earlier_launches();

  const int thread = threadIdx.x % kWarpgroupThreads, group = threadIdx.x / kWarpgroupThreads;
  constexpr int kVectors = kColumns / 8;  // 16-byte vectors of a tile that a thread holds
  const auto row_of = [](int v, int t) { return v * 8 + 2 * (t % 4); };
  RingPosition at;
  for (int tile = 0; tile < a.tiles; ++tile) {
    float d[kColumns / 2];
    const int groups = share.tile_begin(tile + 1) - share.tile_begin(tile);
    const StageOperand weights = {
        .begin = a.token_bytes() + group * (kWarpgroupGroups * kGroupBytes),
        .half_stride = groups * kGroupBytes,
        .group_stride = kGroupBytes};
    const StageOperand tokens = {
        .begin = 0, .half_stride = a.token_groups() * kGroupBytes, .group_stride = kGroupBytes};
    if constexpr (kScaled) {
      weight_scales.copy(tile + 1);
      const int row = share.tile_begin(tile) * kGroupRows + group * 64 + thread / 32 * 16;
      multiply_scaled_tile<kColumns>(
          d, at, share.num_stages, a.stages, shared_address(memory), a.stage_bytes(), weights,
          tokens,
          {.tokens = token_scales,
           .tokens_stage_stride = a.token_scales_stride,
           .tokens_half_stride = a.token_groups() * kGroupRows,
           .rows = {weight_scales.of(tile, row), weight_scales.of(tile, row + 8)}},
          arrived, read);
      if (tile + 1 < a.tiles) weight_scales.wait();
    } else {
      multiply_tile<kColumns, false>(d, at, share.num_stages, a.stages, shared_address(memory),
                                     a.stage_bytes(), weights, tokens, arrived, read);
    }
    const int first = share.tile_begin(tile) * kGroupRows;
    const int end = share.tile_begin(tile + 1) * kGroupRows;
    const auto column_of = [&](int t) {  // of a warpgroup's thread t
      return first + group * 64 + t / 32 * 16 + t % 32 / 4;
    };
    // Threads t, t + 1, … are one warp's where whole warps hold one vector.
    const auto write = [&](int v, int t, float4 values) {
      if constexpr (kScaled) {
        if (a.weight_row_scales != nullptr) {
          const float* of_rows = a.weight_row_scales + column_of(t);
          if (column_of(t) < end) values.x *= __ldg(of_rows), values.y *= __ldg(of_rows);
          if (column_of(t) + 8 < end)
            values.z *= __ldg(of_rows + 8), values.w *= __ldg(of_rows + 8);
        }
      }
      if (a.f32 || a.splits > kWarpgroupThreads / 32) {
        write_four(a, share.batch, row_of(v, t), column_of(t), end, values);
      } else {
        write_warp(a, share.batch, v * 8, column_of(t / 32 * 32), end, values);
      }
    };
    if (a.splits == 1) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        write(v, thread, make_float4(d[4 * v], d[4 * v + 1], d[4 * v + 2], d[4 * v + 3]));
      }
      continue;
    }
    // A warpgroup's threads are divided among the CTAs: each thread's values go to one CTA, ordered
    // there by sender, warpgroup, vector and thread.
    const int sharers = kWarpgroupThreads / a.splits, turn = tile & 1;
    const uint32_t buffer = shared_address(exchange) + turn * L::kTileBytes;
    const auto slot = [&](int sender, int v, int within) {
      return (((sender * kWarpgroups + group) * kVectors + v) * sharers + within) * 16;
    };
    const uint32_t owner = thread / sharers;
    const uint32_t there = address_in_block(buffer, owner);
    const uint32_t barrier = address_in_block(shared_address(&joined[turn]), owner);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      store_in_block(there + slot(share.rank, v, thread % sharers), barrier,
                     make_float4(d[4 * v], d[4 * v + 1], d[4 * v + 2], d[4 * v + 3]));
    }
    barrier_wait(&joined[turn], tile >> 1 & 1);
    for (int i = thread; i < kVectors * sharers; i += kWarpgroupThreads) {
      const int v = i / sharers, within = i % sharers;
      float4 sum = make_float4(0, 0, 0, 0);
      for (int sender = 0; sender < a.splits; ++sender) {
        const float4 part = *reinterpret_cast<const float4*>(exchange + turn * L::kTileBytes +
                                                             slot(sender, v, within));
        sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
      }
      write(v, share.rank * sharers + within, sum);
    }
    // A buffer that is still being read receives nothing: a CTA that sends the tile after next
    // already has this CTA's partial sums of the next one.
    named_barrier(1, L::kThreads);
    if (threadIdx.x == 0 && tile + 2 < a.tiles) {
      barrier_expect(&joined[turn], L::kTileBytes);
    }
  }
}

// ---- launch

// Fills the plan's fields; the operands' fields are set elsewhere.
template <int kColumns, int kWarpgroups>
Arguments planned(const FewRowsPlan& plan, const FewRowsShape& shape) {
  Arguments a = {};
  a.rows = static_cast<int32_t>(shape.rows);
  a.n = static_cast<int32_t>(shape.n);
  a.columns = static_cast<int32_t>(shape.k / (shape.stage_columns() / kStageHalves));
  a.splits = plan.splits;
  a.clusters = plan.clusters;
  a.tiles = plan.tiles(shape.n);
  a.tile_groups = plan.tile_groups(shape.n);
  a.exchanges = plan.exchange_bytes(shape.n) / Layout<kColumns, kWarpgroups>::kTileBytes;
  a.stages = plan.stages(shape);
  a.next_begins_at = plan.next_begins_at(shape);
  a.fetched = plan.fetched(shape);
  a.token_scales_stride = plan.token_scale_bytes(shape) / 4;
  a.tile_scales = plan.tile_scale_bytes(shape) / 4;
  return a;
}

template <int kColumns, int kWarpgroups, bool kScaled>
void launch_planned(const FewRowsPlan& plan, const FewRowsShape& shape, const Maps& maps,
                    const Arguments& a, GpuStream stream) {
  const auto kernel = few_rows_kernel<kColumns, kWarpgroups, kScaled>;
  stream.device().allow_shared_memory(kernel, kMostShared);
  launch(kernel,
         {.blocks = static_cast<unsigned>(shape.batches * plan.clusters * plan.splits),
          .threads = Layout<kColumns, kWarpgroups>::kAllThreads,
          .shared_bytes =
              static_cast<unsigned>(a.stages * plan.stage_bytes(shape) + plan.bytes_behind(shape)),
          .cluster = static_cast<unsigned>(plan.splits)},
         stream, maps, a);
}

// Calls `function` with the plan's columns and warpgroups as constants.
template <bool kScaled, typename Function>
void for_plan(const FewRowsPlan& plan, Function&& function) {
  const auto with = [&]<int kColumns>() {
    if (plan.warpgroups == 1) {
      function.template operator()<kColumns, 1>();
    } else {
      function.template operator()<kColumns, 2>();
    }
  };
  switch (plan.columns) {
    case 8:
      return with.template operator()<8>();
    case 16:
      return with.template operator()<16>();
    case 32:
      return with.template operator()<32>();
    default:
      if constexpr (!kScaled) return with.template operator()<64>();
      check(cudaErrorInvalidConfiguration, "looking for a kernel of so many rows");
  }
}

}  // namespace fathom::cuda::few_rows
