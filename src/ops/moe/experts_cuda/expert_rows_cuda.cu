// What: rows sorted by expert, gathered, and combined again, around the grouped GEMMs of many
// tokens.
//
// Inputs/outputs: expert_rows_cuda.h.
//
// Algorithm: each CTA of sort counts all ids, rather than waiting for other CTAs' counts, and finds
// the places of its own.
//
// Determinism: places follow the order of the pairs; sums have a fixed order.
//
// Limits: kMostMoeExperts experts, tokens x experts a token below 2^31.
//
// Measured: docs/kernels/moe_many_rows.md.
#include <cuda_bf16.h>

#include "device/cuda/launch.h"
#include "device/cuda/ptx.cuh"
#include "ops/moe/experts_cuda/expert_rows_cuda.h"
#include "ops/moe/experts_cuda/expert_sum_cuda.cuh"

namespace fathom::cuda {
namespace {

// ---- sort: each CTA counts all ids and finds the places of its own

constexpr int kSortWarps = 32, kSortThreads = 32 * kSortWarps;

template <int kExperts>
struct SortMemory {
  int before[kExperts], after[kExperts];  // ids before the CTA's and from those on
  // Per warp of the CTA: counts, then the expert's rows from the CTA's first one on. Both are at
  // most kSortThreads: 16 bits hold them, and kMostMoeExperts fit static shared memory.
  uint16_t starts[kSortWarps][kExperts];
  int first_rows[kExperts];  // per expert, of the CTA's pairs
  int ends[2][kExperts];     // running sums: units of kExpertRowUnit rows, row tiles
};

template <int kExperts>
__device__ void count_all(SortMemory<kExperts>& memory, const int32_t* expert_ids, int pairs,
                          int first) {
  for (int i = 4 * static_cast<int>(threadIdx.x); i < pairs; i += 4 * kSortThreads) {
    int ids[4] = {-1, -1, -1, -1};
    if (i + 4 <= pairs) {
      *reinterpret_cast<int4*>(ids) = *reinterpret_cast<const int4*>(expert_ids + i);
    } else {
      for (int j = 0; i + j < pairs; ++j) ids[j] = expert_ids[i + j];
    }
    int* counts = i < first ? memory.before : memory.after;  // first is a multiple of 4
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (ids[j] >= 0) atomicAdd(&counts[ids[j]], 1);
    }
  }
}

template <int kExperts>
__global__ void __launch_bounds__(kSortThreads, 1)
    sort_kernel(const SortByExpertArguments arguments) {
  __shared__ SortMemory<kExperts> memory;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, expert = threadIdx.x;
  const int first = static_cast<int>(blockIdx.x) * kSortThreads;
  if (expert < kExperts) memory.before[expert] = memory.after[expert] = 0;
  for (int e = lane; e < kExperts; e += 32) memory.starts[warp][e] = 0;
  let_next_launch_begin();
  wait_for_earlier_launches();
  int pairs = arguments.pairs;
  if (arguments.num_pairs != nullptr) pairs = min(pairs, *arguments.num_pairs);
  if (first >= pairs && blockIdx.x > 0) return;  // the first CTA lists the tiles
  __syncthreads();
  count_all(memory, arguments.expert_ids, pairs, first);
  const int pair = first + static_cast<int>(threadIdx.x);
  const int id = pair < pairs ? arguments.expert_ids[pair] : -1;
  const unsigned same = __match_any_sync(~0u, id);
  const int earlier = __popc(same & ((1u << lane) - 1));
  if (id >= 0 && earlier == 0) memory.starts[warp][id] = static_cast<uint16_t>(__popc(same));
  __syncthreads();

  int units = 0, tiles = 0;
  if (expert < kExperts) {
    const int rows = memory.before[expert] + memory.after[expert];
    units = (rows + kExpertRowUnit - 1) / kExpertRowUnit;
    tiles = (units + arguments.tile_units - 1) / arguments.tile_units;
    memory.ends[0][expert] = units;
    memory.ends[1][expert] = tiles;
  }
  __syncthreads();
  for (int distance = 1; distance < kExperts; distance *= 2) {
    int more[2] = {0, 0};
    if (expert < kExperts && expert >= distance) {
      more[0] = memory.ends[0][expert - distance];
      more[1] = memory.ends[1][expert - distance];
    }
    __syncthreads();
    if (expert < kExperts) {
      memory.ends[0][expert] += more[0];
      memory.ends[1][expert] += more[1];
    }
    __syncthreads();
  }
  if (expert < kExperts) {
    const int first_row = (memory.ends[0][expert] - units) * kExpertRowUnit;
    const int first_tile = memory.ends[1][expert] - tiles;
    memory.first_rows[expert] = first_row + memory.before[expert];
    int start = 0;
    for (int w = 0; w < kSortWarps; ++w) {
      const int count = memory.starts[w][expert];
      memory.starts[w][expert] = static_cast<uint16_t>(start);
      start += count;
    }
    if (blockIdx.x == 0) {
      for (int i = 0; i < tiles; ++i) {
        arguments.row_tiles[first_tile + i] = {.expert = expert,
                                               .first_row = first_row,
                                               .units = units,
                                               .first_tile = first_tile,
                                               .num_tiles = tiles};
      }
      if (expert == kExperts - 1) *arguments.num_row_tiles = memory.ends[1][expert];
      if (expert < 2) arguments.tiles_taken[expert] = 0;
    }
  }
  __syncthreads();
  if (pair < pairs) {
    arguments.positions[pair] =
        id >= 0 ? memory.first_rows[id] + memory.starts[warp][id] + earlier : -1;
  }
}

// ---- gather: one CTA per token

constexpr int kGatherThreads = 128;

__global__ void __launch_bounds__(kGatherThreads)
    gather_kernel(const GatherRowsArguments arguments) {
  const int thread = threadIdx.x, vectors = arguments.vectors;
  const int64_t row = blockIdx.x;
  // In this order: the next launch then begins when sort has ended, and can read its lists.
  wait_for_earlier_launches();
  let_next_launch_begin();
  const uint4* from = static_cast<const uint4*>(arguments.x) + row * vectors;
  const int32_t* positions = arguments.positions + row * arguments.experts_per_token;
  constexpr int kAtOnce = 4;
  for (int first = thread; first < vectors; first += kGatherThreads * kAtOnce) {
    uint4 values[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + kGatherThreads * i < vectors) values[i] = from[first + kGatherThreads * i];
    }
    for (int j = 0; j < arguments.experts_per_token; ++j) {
      const int64_t position = positions[j];
      if (position < 0) continue;
      uint4* to = static_cast<uint4*>(arguments.sorted_x) + position * vectors;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + kGatherThreads * i < vectors) to[first + kGatherThreads * i] = values[i];
      }
    }
  }
  for (int block = thread; block < arguments.scale_blocks; block += kGatherThreads) {
    const float scale = arguments.scales[block * arguments.scales_stride + row];
    float* to = arguments.sorted_scales + block * arguments.sorted_scales_stride;
    for (int j = 0; j < arguments.experts_per_token; ++j) {
      if (positions[j] >= 0) to[positions[j]] = scale;
    }
  }
}

// ---- combine: one CTA per token

constexpr int kCombineThreads = 256;

template <bool kF32>
__global__ void __launch_bounds__(kCombineThreads)
    combine_kernel(const CombineExpertsArguments arguments) {
  __shared__ int positions[kCombineThreads];
  __shared__ float weights[kCombineThreads];
  __shared__ int count;
  const int num = arguments.experts_per_token, thread = threadIdx.x, vectors = arguments.hidden / 8;
  const int64_t row = blockIdx.x;
  const auto* results = static_cast<const uint4*>(arguments.results);
  const auto* shared_results = static_cast<const uint4*>(arguments.shared_results);
  let_next_launch_begin();
  wait_for_earlier_launches();
  // Sorted rows ascend with the experts.
  if (thread < num) {
    const int32_t* all = arguments.positions + row * num;
    const int mine = all[thread];
    int before = 0, present = 0;
    for (int j = 0; j < num; ++j) {
      before += all[j] >= 0 && all[j] < mine;
      present += all[j] >= 0;
    }
    if (mine >= 0) {
      positions[before] = mine;
      weights[before] = arguments.weights[row * num + thread];
    }
    if (thread == 0) count = present;
  }
  if (num == 0 && thread == 0) count = 0;
  __syncthreads();
  for (int v = thread; v < vectors; v += kCombineThreads) {
    float sum[8] = {};
    uint4 last = {};
    if (shared_results != nullptr) last = shared_results[row * vectors + v];
    add_results(sum, weights, count,
                [&](int expert) { return results[int64_t{positions[expert]} * vectors + v]; });
    add_scaled(sum, last, 1);
    store_sum<kF32>(sum, arguments.out, row * vectors + v);
  }
}

}  // namespace

void sort_by_expert(const SortByExpertArguments& a, GpuStream stream) {
  // Up to 256 experts (V3) take a kernel without the cost of larger tables.
  launch(a.num_experts <= 256 ? sort_kernel<256> : sort_kernel<kMostMoeExperts>,
         {.blocks = static_cast<unsigned>((a.pairs + kSortThreads - 1) / kSortThreads),
          .threads = kSortThreads},
         stream, a);
}

void gather_rows(const GatherRowsArguments& a, GpuStream stream) {
  launch(gather_kernel, {.blocks = static_cast<unsigned>(a.rows), .threads = kGatherThreads},
         stream, a);
}

void combine_experts(const CombineExpertsArguments& a, GpuStream stream) {
  launch(a.out_type == DType::kF32 ? combine_kernel<true> : combine_kernel<false>,
         {.blocks = static_cast<unsigned>(a.rows), .threads = kCombineThreads}, stream, a);
}

}  // namespace fathom::cuda
