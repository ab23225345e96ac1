// What: the first of the two launches of moe_few_rows. Groups (token, expert) pairs by expert, and
// for every expert with tokens, and the shared one with all:
// activations[pair] = weight * silu(gate x) * (up x), bf16.
//
// Inputs/outputs: moe_cuda.h, moe_few_rows_parts_cuda.h.
//
// Layout: a block a multiprocessor: kWarpgroups warpgroups of tensor cores, one that copies, one
// that groups. A ring of stages (weight_stream_cuda.cuh) of 128 columns (of hidden): up to 64
// tokens, then up to 4 * kWarpgroups pairs of 8 rows of gate and the same 8 of up: a thread has
// both of an activation in its registers.
//
// Algorithm: each block takes its 1 / blocks of the shared expert's intermediate columns: their
// weights are on their way before earlier launches have ended. Meanwhile its grouping warps count
// the tokens of each expert, in every block alike; then it takes its 1 / blocks of the intermediate
// columns of all experts that have tokens, tokens in tiles of 64. An expert's weights are read once
// for each 64 of its tokens. Weights go through the copy engine; tokens' rows are gathered by
// cp.async.
//
// Determinism: a pair's place is by expert, then by its index; no result depends on an order of
// arrival (the counting's atomics are of integers).
//
// Limits: 256 experts, 4,096 pairs.
//
// Source: weights on M for few tokens, grouping within the launch and expert lists kept on the
// device as in HPC-Ops' and FlashInfer's mixture-of-experts kernels for small batches.
//
// Measured: docs/kernels/moe_few_rows.md.
#include <algorithm>

#include "device/cuda/launch.h"
#include "device/cuda/ptx.cuh"
#include "device/cuda/tensor_map.h"
#include "ops/linear/weight_stream_cuda.cuh"
#include "ops/moe/moe_few_rows_walk_cuda.cuh"

namespace fathom::cuda {
namespace {

constexpr int kPairBytes = 2 * kStageHalves * kGroupBytes;  // 8 rows of gate and 8 of up
constexpr int kMapSizes = 4;                                // boxes of 1, 2, 4 or 8 pairs
constexpr int kWarpgroupPairs = 4;
constexpr int kMaxStages = 16;
constexpr int kWarpgroupThreads = 128;
constexpr int kMaxExperts = 256;

struct Arguments {
  const __nv_bfloat16* x;
  const int32_t* expert_ids;
  const float* expert_weights;
  MoeFewRowsWorkspace to;
  int32_t rows, hidden, num_experts, experts_per_token, inter, shared_inter;
  int32_t stages, token_groups;

  __device__ int num_pairs() const { return rows * experts_per_token; }
  __device__ int num_stages() const { return (hidden + kStageColumns - 1) / kStageColumns; }
  __host__ __device__ int token_bytes() const { return token_groups * kStageHalves * kGroupBytes; }
};

struct Maps {
  CUtensorMap weights[kMapSizes], shared_weights[kMapSizes];
};

// What lies behind the ring.
struct Tables {
  uint64_t arrived[kMaxStages], read[kMaxStages], grouped;
  int num_tiles;
  TokenTile tiles[kMaxTokenTiles];
  int counts[kMaxExperts], places[kMaxExperts];  // of each expert; its first pair's
  // Then, for each pair: ids [num_pairs] i16, and sorted [num_pairs] u16, pairs by place: those of
  // the block's own tiles.
  __device__ int16_t* ids() { return reinterpret_cast<int16_t*>(this + 1); }
  __device__ uint16_t* sorted(int num_pairs) {
    return reinterpret_cast<uint16_t*>(ids() + num_pairs);
  }
};

// ---- grouping: one warpgroup

__device__ void meet_grouping() { named_barrier(2, kWarpgroupThreads); }

// Places and tiles of all experts, by one warp.
__device__ void place_experts(Tables& tables, int num_experts) {
  const int lane = threadIdx.x % 32;
  constexpr int kEach = kMaxExperts / 32;
  // Pairs in the lower half, tiles in the upper.
  const auto both = [](int count) { return count | (count + kTileTokens - 1) / kTileTokens << 16; };
  int sum = 0;
  for (int i = 0; i < kEach; ++i) sum += both(tables.counts[lane * kEach + i]);
  int before = sum;
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(~0u, before, distance);
    if (lane >= distance) before += other;
  }
  if (lane == 31) tables.num_tiles = before >> 16;
  before -= sum;
  for (int i = 0; i < kEach; ++i) {
    const int expert = lane * kEach + i, count = tables.counts[expert];
    if (expert < num_experts) tables.places[expert] = before & 0xFFFF;
    for (int first = 0; first < count; first += kTileTokens) {
      tables.tiles[(before >> 16) + first / kTileTokens] = {
          (before & 0xFFFF) + first, static_cast<int16_t>(expert),
          static_cast<int16_t>(min(kTileTokens, count - first))};
    }
    before += both(count);
  }
}

// The pairs of one tile, by one warp: those of its expert, in the order of their index.
__device__ void list_tile(Tables& tables, const Arguments& a, int index, bool write) {
  const int lane = threadIdx.x % 32, num_pairs = a.num_pairs();
  const TokenTile tile = tables.tiles[index];
  const int16_t* ids = tables.ids();
  uint16_t* sorted = tables.sorted(num_pairs);
  int place = tables.places[tile.expert];
  for (int base = 0; base < num_pairs; base += 32) {
    const int pair = base + lane;
    const bool is_one = pair < num_pairs && ids[pair] == tile.expert;
    const unsigned ones = __ballot_sync(~0u, is_one);
    const int mine = place + __popc(ones & ((1u << lane) - 1));
    if (is_one && mine >= tile.first && mine < tile.first + tile.count) {
      sorted[mine] = static_cast<uint16_t>(pair);
      if (write) a.to.tokens[mine] = pair / a.experts_per_token;
    }
    place += __popc(ones);
  }
}

__device__ void group(Tables& tables, const Arguments& a) {
  const int thread = threadIdx.x % kWarpgroupThreads, num_pairs = a.num_pairs();
  for (int i = thread; i < kMaxExperts; i += kWarpgroupThreads) tables.counts[i] = 0;
  meet_grouping();
  for (int i = thread; i < num_pairs; i += kWarpgroupThreads) {
    const int id = a.expert_ids[i];
    tables.ids()[i] = static_cast<int16_t>(id);
    if (id >= 0) atomicAdd(&tables.counts[id], 1);
  }
  meet_grouping();
  if (thread < 32) place_experts(tables, a.num_experts);
  meet_grouping();
  const Walk walk(tables.num_tiles, a.inter / 8, 1, blockIdx.x, gridDim.x);
  for (int tile = walk.first_tile() + thread / 32; tile < walk.end_tile(); tile += 4) {
    list_tile(tables, a, tile, walk.begins(tile));
  }
  barrier_arrive(&tables.grouped);
  if (blockIdx.x == 0) {
    if (thread == 0) *a.to.num_tiles = tables.num_tiles;
    for (int i = thread; i < tables.num_tiles; i += kWarpgroupThreads) {
      a.to.tiles[i] = tables.tiles[i];
    }
  }
}

// ---- copies: one warpgroup

class Copies {
 public:
  __device__ Copies(uint8_t* ring, int stage_bytes, Tables& tables, const Arguments& a)
      : ring_(ring),
        stage_bytes_(stage_bytes),
        tables_(tables),
        a_(a),
        thread_(threadIdx.x % kWarpgroupThreads) {}

  // Weights of the first stages of the shared expert.
  __device__ void begin(Walk walk, const CUtensorMap* maps) {
    for (Piece piece; ahead_ < a_.stages && walk.next(piece);) {
      for (int k = 0; k < a_.num_stages() && ahead_ < a_.stages; ++k) {
        copy_weights(ahead_++, maps, piece.first, piece.count, k);
      }
    }
  }

  __device__ void run(const CUtensorMap* maps, const Piece& piece, const TokenTile& tile,
                      int first_pair, bool routed) {
    const int chunk = thread_ % 16, row = thread_ / 16;  // of each group of 8 tokens
    const uint32_t to =
        chunk / 8 * (a_.token_groups * kGroupBytes) + swizzled_chunk(row, chunk % 8);
    const __nv_bfloat16* from[kTileTokens / kGroupRows];
#pragma unroll
    for (int i = 0; i < kTileTokens / kGroupRows; ++i) {
      const int place = tile.first + i * kGroupRows + row;
      from[i] = nullptr;
      if (i * kGroupRows + row >= tile.count) continue;
      const int token =
          routed ? tables_.sorted(a_.num_pairs())[place] / a_.experts_per_token : place;
      from[i] = a_.x + static_cast<int64_t>(token) * a_.hidden + chunk * 8;
    }
    for (int k = 0; k < a_.num_stages(); ++k, ++done_) {
      if (done_ >= a_.stages) barrier_wait(&tables_.read[at_.stage], at_.parity ^ 1);
      if (done_ >= ahead_) copy_weights(at_.stage, maps, first_pair + piece.first, piece.count, k);
      const uint32_t stage = shared_address(ring_) + at_.stage * stage_bytes_ + to;
      const int column = k * kStageColumns;
      const int bytes = column + chunk * 8 < a_.hidden ? 16 : 0;
#pragma unroll
      for (int i = 0; i < kTileTokens / kGroupRows; ++i) {
        if (from[i] == nullptr) continue;
        copy_16_or_zero(stage + i * kGroupBytes, bytes == 0 ? from[i] : from[i] + column, bytes);
      }
      barrier_arrive_after_copies(&tables_.arrived[at_.stage]);
      at_.advance(a_.stages);
    }
  }

 private:
  __device__ void copy_weights(int stage, const CUtensorMap* maps, int first_pair, int pairs,
                               int k) const {
    if (thread_ != 0) return;
    uint64_t* arrived = &tables_.arrived[stage];
    barrier_expect(arrived, pairs * kPairBytes);
    uint8_t* to = ring_ + stage * stage_bytes_ + a_.token_bytes();
    for (int size = kMapSizes - 1; size >= 0; --size) {
      const int box = 1 << size;
      if ((pairs & box) == 0) continue;
      copy_box(to, &maps[size], arrived, 0, 0, k * kStageHalves, 0, first_pair);
      to += box * kPairBytes;
      first_pair += box;
    }
  }

  uint8_t* const ring_;
  const int stage_bytes_;
  Tables& tables_;
  const Arguments& a_;
  const int thread_;
  RingPosition at_;
  int done_ = 0, ahead_ = 0;  // stages begun; those whose weights were asked for in begin()
};

// ---- products and SwiGLU

__device__ float swiglu(float gate, float up) {
  constexpr float kLog2E = 1.4426950408889634f;
  return gate / (1 + exp2_fast(-gate * kLog2E)) * up;
}

class Products {
 public:
  __device__ Products(const uint8_t* ring, int stage_bytes, Tables& tables, const Arguments& a)
      : ring_(shared_address(ring)), stage_bytes_(stage_bytes), tables_(tables), a_(a) {}

  __device__ void run(const Piece& piece, const TokenTile& tile, bool routed) {
    with_columns(tile.count, [&]<int kColumns>() { run_with<kColumns>(piece, tile, routed); });
  }

 private:
  template <int kColumns>
  __device__ void run_with(const Piece& piece, const TokenTile& tile, bool routed) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const auto column_of = [&](int i) { return i / 2 * 8 + 2 * (lane % 4) + i % 2; };
    float weight[kColumns / 4];
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i) {
      weight[i] = 1;
      if (routed && column_of(i) < tile.count) {
        weight[i] = a_.expert_weights[tables_.sorted(a_.num_pairs())[tile.first + column_of(i)]];
      }
    }
    float d[kColumns / 2];
    multiply_tile<kColumns, true>(
        d, at_, a_.num_stages(), a_.stages, ring_, stage_bytes_,
        {.begin = a_.token_bytes() + warp / 4 * (kWarpgroupPairs * kPairBytes),
         .half_stride = kGroupBytes,
         .group_stride = kStageHalves * kGroupBytes},
        {.begin = 0, .half_stride = a_.token_groups * kGroupBytes, .group_stride = kGroupBytes},
        tables_.arrived, tables_.read);
    if (warp >= piece.count) return;  // a warp has the 16 rows of one pair
    const int inter = routed ? a_.inter : a_.shared_inter;
    __nv_bfloat16* out = (routed ? a_.to.routed : a_.to.shared) +
                         static_cast<int64_t>(tile.first) * inter + (piece.first + warp) * 8 +
                         lane / 4;
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i) {
      const int j = i / 2 * 4 + i % 2;
      if (column_of(i) < tile.count) {
        out[static_cast<int64_t>(column_of(i)) * inter] =
            __float2bfloat16(swiglu(d[j], d[j + 2]) * weight[i]);
      }
    }
  }

  const uint32_t ring_;
  const int stage_bytes_;
  Tables& tables_;
  const Arguments& a_;
  RingPosition at_;
};

// ---- the kernel

template <int kWarpgroups>
__global__ void __launch_bounds__((kWarpgroups + 2) * kWarpgroupThreads, 1)
    gate_up_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Arguments a) {
  constexpr int kMultiply = kWarpgroups * kWarpgroupThreads;
  constexpr int kMost = kWarpgroups * kWarpgroupPairs;
  extern __shared__ __align__(1024) uint8_t memory[];
  const int stage_bytes = a.token_bytes() + kMost * kPairBytes;
  Tables& tables = *reinterpret_cast<Tables*>(memory + a.stages * stage_bytes);
  if (threadIdx.x == 0) {
    for (int i = 0; i < a.stages; ++i) {
      barrier_init(&tables.arrived[i], kWarpgroupThreads + 1);
      barrier_init(&tables.read[i], kWarpgroups * 4);
    }
    barrier_init(&tables.grouped, kWarpgroupThreads);
    fence_barrier_init();
    let_next_launch_begin();
  }
  __syncthreads();

  const auto shared_walk = [&] {
    return Walk(a.shared_inter == 0 ? 0 : num_shared_tiles(a.rows), max(a.shared_inter / 8, 1),
                kMost, blockIdx.x, gridDim.x);
  };
  const auto routed_walk = [&] {
    return Walk(tables.num_tiles, a.inter / 8, kMost, blockIdx.x, gridDim.x);
  };
  if (threadIdx.x < kMultiply) {
    wait_for_earlier_launches();
    Products products(memory, stage_bytes, tables, a);
    Piece piece;
    for (Walk walk = shared_walk(); walk.next(piece);) {
      products.run(piece, shared_tile(piece.tile, a.rows), false);
    }
    barrier_wait(&tables.grouped, 0);
    for (Walk walk = routed_walk(); walk.next(piece);) {
      products.run(piece, tables.tiles[piece.tile], true);
    }
  } else if (threadIdx.x < kMultiply + kWarpgroupThreads) {
    Copies copies(memory, stage_bytes, tables, a);
    copies.begin(shared_walk(), maps.shared_weights);
    wait_for_earlier_launches();
    Piece piece;
    for (Walk walk = shared_walk(); walk.next(piece);) {
      copies.run(maps.shared_weights, piece, shared_tile(piece.tile, a.rows), 0, false);
    }
    barrier_wait(&tables.grouped, 0);
    for (Walk walk = routed_walk(); walk.next(piece);) {
      const TokenTile tile = tables.tiles[piece.tile];
      copies.run(maps.weights, piece, tile, tile.expert * (2 * a.inter / 8), true);
    }
  } else {
    wait_for_earlier_launches();
    group(tables, a);
  }
}

// Boxes of 1, 2, 4 and 8 times 8 rows of gate and the same of up, 128 columns.
void make_maps(CUtensorMap* maps, const void* matrix, int64_t experts, int64_t inter,
               int64_t hidden) {
  for (int size = 0; size < kMapSizes; ++size) {
    const Axis axes[] = {
        {64, 1, 64},
        {8, hidden, 8},
        {hidden / 64, 64, kStageHalves},
        {2, inter * hidden, 2},
        // The last up's rows are the first one's, `inter` further: no box begins there.
        {(2 * experts - 1) * inter / 8, 8 * hidden, 1 << size}};
    maps[size] = bf16_map(matrix, axes);
  }
}

template <int kWarpgroups>
void launch_for(const MoeFewRowsPlan& plan, const Maps& maps, Arguments a, cudaStream_t stream) {
  const auto kernel = gate_up_kernel<kWarpgroups>;
  constexpr int kMostBytes = 227 * 1024;
  static const bool prepared = (allow_shared_memory(kernel, kMostBytes), true);
  static_cast<void>(prepared);
  const int stage_bytes = a.token_bytes() + kWarpgroups * kWarpgroupPairs * kPairBytes;
  a.stages = std::clamp(plan.gate_ring_bytes / stage_bytes, 2, kMaxStages);
  const int pairs = a.rows * a.experts_per_token;
  launch(
      kernel,
      {.blocks = static_cast<unsigned>(plan.gate_blocks),
       .threads = (kWarpgroups + 2) * kWarpgroupThreads,
       .shared_bytes = static_cast<unsigned>(a.stages * stage_bytes + sizeof(Tables) + pairs * 4)},
      stream, maps, a);
}

}  // namespace

void moe_gate_up(const MoeFewRowsPlan& plan, const MoeArguments& arguments,
                 const MoeFewRowsWorkspace& workspace, cudaStream_t stream) {
  const MoeShape& shape = arguments.shape;
  const Arguments a = {.x = static_cast<const __nv_bfloat16*>(arguments.x),
                       .expert_ids = arguments.expert_ids,
                       .expert_weights = arguments.expert_weights,
                       .to = workspace,
                       .rows = arguments.rows,
                       .hidden = shape.hidden,
                       .num_experts = shape.num_experts,
                       .experts_per_token = shape.experts_per_token,
                       .inter = shape.inter,
                       .shared_inter = shape.shared_inter,
                       .stages = 0,
                       .token_groups = std::min((arguments.rows + 7) / 8, kTileTokens / 8)};
  Maps maps;
  make_maps(maps.weights, arguments.gate_up, shape.num_experts, shape.inter, shape.hidden);
  if (shape.shared_inter > 0) {
    make_maps(maps.shared_weights, arguments.shared_gate_up, 1, shape.shared_inter, shape.hidden);
  }
  if (plan.gate_warpgroups == 1) {
    launch_for<1>(plan, maps, a, stream);
  } else {
    launch_for<2>(plan, maps, a, stream);
  }
}

}  // namespace fathom::cuda
