// What: the second of the two launches of moe_few_rows.
// out[t] = down_shared activations_shared[t] + sum over t's pairs p of down_expert(p)
// activations[p].
//
// Inputs/outputs: moe_cuda.h, moe_few_rows_parts_cuda.h.
//
// Layout: clusters of `splits` blocks, up to one block a multiprocessor: kWarpgroups warpgroups of
// tensor cores, a warp that copies, a warp that reads the list of token tiles. A cluster has up to
// 64 * kWarpgroups rows of all matrices: hidden columns of out. A ring of stages
// (weight_stream_cuda.cuh) of 128 columns (intermediate), and in shared memory the sums [rows, own
// hidden columns] in fp32.
//
// Algorithm: each block takes its share of the shared expert's intermediate columns, whose weights
// are on their way before earlier launches have ended, then its share of those of all experts that
// have tokens. An expert's tokens are neighbours in the activations; what a run of its columns
// gives is added to the sums of its tokens. At the end each block adds up the cluster's sums of a
// share of the elements and writes them.
//
// Determinism: each sum is formed by one thread after another in the order of the experts, the
// cluster's in the order of its blocks. Bits depend on which experts other tokens have: a run of
// columns may end elsewhere.
//
// Limits: rows * own hidden columns * 4 bytes of shared memory: 512 rows.
//
// Source: as moe_gate_up_cuda.cu.
//
// Measured: docs/kernels/moe_few_rows.md.
#include <algorithm>

#include "device/cuda/cluster.cuh"
#include "device/cuda/launch.h"
#include "device/cuda/ptx.cuh"
#include "device/cuda/tensor_map.h"
#include "ops/linear/weight_stream_cuda.cuh"
#include "ops/moe/moe_few_rows_walk_cuda.cuh"

namespace fathom::cuda {
namespace {

constexpr int kBoxes = 2;
constexpr int kGroupBytes = kBoxes * 1024;
constexpr int kMaxStages = 32;
constexpr int kWarpgroupThreads = 128;
constexpr int kAllUnits = 1 << 20;  // a piece may be as long as its tile

struct Arguments {
  void* out;
  MoeFewRowsWorkspace from;
  int32_t rows, hidden, inter, shared_inter;
  int32_t splits, clusters, stages, stage_bytes, token_groups;
  bool f32;
};

struct Tables {
  uint64_t arrived[kMaxStages], read[kMaxStages], listed;
  int num_tiles;
  TokenTile tiles[kMaxTokenTiles];
};

struct Maps {
  CUtensorMap weights, shared_weights, tokens, shared_tokens;
};

// A block's share of the work.
struct Share {
  int rank, first_group, num_groups;  // of 8 hidden columns

  __device__ explicit Share(const Arguments& a) {
    const int cluster = blockIdx.x / a.splits, groups = a.hidden / kGroupRows;
    rank = blockIdx.x % a.splits;
    first_group = groups * cluster / a.clusters;
    num_groups = groups * (cluster + 1) / a.clusters - first_group;
  }
};

__device__ Walk shared_walk(const Arguments& a, const Share& share) {
  constexpr int kColumns = kBoxes * 64;
  return {a.shared_inter == 0 ? 0 : num_shared_tiles(a.rows),
          max((a.shared_inter + kColumns - 1) / kColumns, 1), kAllUnits, share.rank, a.splits};
}
__device__ Walk routed_walk(const Arguments& a, const Share& share, const Tables& tables) {
  constexpr int kColumns = kBoxes * 64;
  return {tables.num_tiles, (a.inter + kColumns - 1) / kColumns, kAllUnits, share.rank, a.splits};
}

// ---- copies: one warp

class Copies {
 public:
  __device__ Copies(uint8_t* ring, Tables& tables, const Share& share, const Arguments& a)
      : ring_(ring), tables_(tables), share_(share), a_(a), lane_(threadIdx.x % 32) {}

  // Weights of the first stages of the shared expert.
  __device__ void begin(Walk walk, const CUtensorMap& weights) {
    for (Piece piece; ahead_ < a_.stages && walk.next(piece);) {
      const int tokens = groups_of(shared_tile(piece.tile, a_.rows));
      for (int k = 0; k < piece.count && ahead_ < a_.stages; ++k) {
        copy_weights(ahead_++, weights, 0, piece.first + k, tokens);
      }
    }
  }

  __device__ void run(const CUtensorMap& weights, const CUtensorMap& tokens, const Piece& piece,
                      const TokenTile& tile) {
    const int groups = groups_of(tile);
    for (int k = 0; k < piece.count; ++k, ++done_) {
      if (done_ >= a_.stages) barrier_wait(&tables_.read[at_.stage], at_.parity ^ 1);
      if (done_ >= ahead_) copy_weights(at_.stage, weights, tile.expert, piece.first + k, groups);
      if (lane_ < groups) {
        copy_box(ring_ + at_.stage * a_.stage_bytes + lane_ * kGroupBytes, &tokens,
                 &tables_.arrived[at_.stage], 0, tile.first + lane_ * kGroupRows,
                 (piece.first + k) * kBoxes);
      }
      at_.advance(a_.stages);
    }
  }

 private:
  __device__ static int groups_of(const TokenTile& tile) {
    return (tile.count + kGroupRows - 1) / kGroupRows;
  }
  __device__ void copy_weights(int stage, const CUtensorMap& map, int expert, int k,
                               int tokens) const {
    if (lane_ == 0) {
      barrier_expect(&tables_.arrived[stage], (share_.num_groups + tokens) * kGroupBytes);
    }
    __syncwarp();
    if (lane_ < share_.num_groups) {
      copy_box(ring_ + stage * a_.stage_bytes + (a_.token_groups + lane_) * kGroupBytes, &map,
               &tables_.arrived[stage], 0,
               expert * a_.hidden + (share_.first_group + lane_) * kGroupRows, k * kBoxes);
    }
  }

  uint8_t* const ring_;
  Tables& tables_;
  const Share& share_;
  const Arguments& a_;
  const int lane_;
  RingPosition at_;
  int done_ = 0, ahead_ = 0;  // stages begun; those whose weights were asked for in begin()
};

__device__ void read_list(Tables& tables, const Arguments& a) {
  const int lane = threadIdx.x % 32, num_tiles = *a.from.num_tiles;
  for (int i = lane; i < num_tiles; i += 32) tables.tiles[i] = a.from.tiles[i];
  if (lane == 0) tables.num_tiles = num_tiles;
  __syncwarp();
  if (lane == 0) barrier_arrive(&tables.listed);
}

// ---- products and their sums

template <int kWarpgroups>
class Products {
 public:
  static constexpr int kThreads = kWarpgroups * kWarpgroupThreads;
  static constexpr int kStride = down_sum_bytes(kWarpgroups) / 4;  // of a row of sums

  __device__ Products(const uint8_t* ring, float* sums, Tables& tables, const Arguments& a)
      : ring_(shared_address(ring)), sums_(sums), tables_(tables), a_(a) {
    for (int i = threadIdx.x; i < a.rows * kStride / 4; i += kThreads) {
      reinterpret_cast<float4*>(sums)[i] = make_float4(0, 0, 0, 0);
    }
    meet();
  }

  __device__ static void meet() { named_barrier(1, kThreads); }

  __device__ void run(const Piece& piece, const TokenTile& tile, bool routed) {
    with_columns(tile.count, [&]<int kColumns>() { run_with<kColumns>(piece, tile, routed); });
  }

 private:
  template <int kColumns>
  __device__ void run_with(const Piece& piece, const TokenTile& tile, bool routed) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int token[kColumns / 4];
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i) {
      const int column = i / 2 * 8 + 2 * (lane % 4) + i % 2;
      token[i] = -1;
      if (column < tile.count) {
        token[i] = routed ? a_.from.tokens[tile.first + column] : tile.first + column;
      }
    }
    float d[kColumns / 2];
    multiply_tile<kColumns, kBoxes, false>(
        d, at_, piece.count, a_.stages, ring_, a_.stage_bytes,
        a_.token_groups * kGroupBytes + warp / 4 * (kWarpgroupGroups * kGroupBytes), 0,
        tables_.arrived, tables_.read);
    // A warp alone has these columns of all rows.
    float* sums = sums_ + warp * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i) {
      const int j = i / 2 * 4 + i % 2;
      if (token[i] < 0) continue;
      sums[token[i] * kStride] += d[j];
      sums[token[i] * kStride + 8] += d[j + 2];
    }
    __syncwarp();
  }

  const uint32_t ring_;
  float* const sums_;
  Tables& tables_;
  const Arguments& a_;
  RingPosition at_;
};

// This block's share of the cluster's rows and columns.
template <int kStride, int kThreads>
__device__ void write_out(const float* sums, const Share& share, const Arguments& a) {
  const int vectors = 2 * share.num_groups;  // of four columns, in a row
  const int all = a.rows * vectors, end = all * (share.rank + 1) / a.splits;
  for (int i = all * share.rank / a.splits + threadIdx.x; i < end; i += kThreads) {
    const int row = i / vectors, column = i % vectors * 4;
    const uint32_t address = shared_address(sums + row * kStride + column);
    float4 sum = make_float4(0, 0, 0, 0);
    for (int block = 0; block < a.splits; ++block) {
      const float4 part = load_from_block(address_in_block(address, block));
      sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
    }
    const int64_t at = static_cast<int64_t>(row) * a.hidden + share.first_group * 8 + column;
    if (a.f32) {
      *reinterpret_cast<float4*>(static_cast<float*>(a.out) + at) = sum;
    } else {
      *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(a.out) + at) =
          make_uint2(pack_bf16(sum.x, sum.y), pack_bf16(sum.z, sum.w));
    }
  }
}

// ---- the kernel

template <int kWarpgroups>
__global__ void __launch_bounds__(kWarpgroups* kWarpgroupThreads + 64, 1)
    down_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Arguments a) {
  constexpr int kThreads = Products<kWarpgroups>::kThreads;
  constexpr int kStride = Products<kWarpgroups>::kStride;
  extern __shared__ __align__(1024) uint8_t memory[];
  // The last stage's product may read rows beyond its own: sums lie there.
  auto* const sums = reinterpret_cast<float*>(memory + a.stages * a.stage_bytes);
  Tables& tables = *reinterpret_cast<Tables*>(sums + a.rows * kStride);
  if (threadIdx.x == 0) {
    for (int i = 0; i < a.stages; ++i) {
      barrier_init(&tables.arrived[i], 1);
      barrier_init(&tables.read[i], kWarpgroups * 4);
    }
    barrier_init(&tables.listed, 1);
    fence_barrier_init();
    let_next_launch_begin();
  }
  __syncthreads();

  const Share share(a);
  Piece piece;
  if (threadIdx.x < kThreads) {
    wait_for_earlier_launches();
    Products<kWarpgroups> products(memory, sums, tables, a);
    for (Walk walk = shared_walk(a, share); walk.next(piece);) {
      products.run(piece, shared_tile(piece.tile, a.rows), false);
    }
    barrier_wait(&tables.listed, 0);
    for (Walk walk = routed_walk(a, share, tables); walk.next(piece);) {
      products.run(piece, tables.tiles[piece.tile], true);
    }
  } else if (threadIdx.x < kThreads + 32) {
    Copies copies(memory, tables, share, a);
    copies.begin(shared_walk(a, share), maps.shared_weights);
    wait_for_earlier_launches();
    for (Walk walk = shared_walk(a, share); walk.next(piece);) {
      copies.run(maps.shared_weights, maps.shared_tokens, piece, shared_tile(piece.tile, a.rows));
    }
    barrier_wait(&tables.listed, 0);
    for (Walk walk = routed_walk(a, share, tables); walk.next(piece);) {
      copies.run(maps.weights, maps.tokens, piece, tables.tiles[piece.tile]);
    }
  } else {
    wait_for_earlier_launches();
    read_list(tables, a);
  }
  __syncwarp();
  if (a.splits > 1) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }
  if (threadIdx.x < kThreads) write_out<kStride, kThreads>(sums, share, a);
  if (a.splits > 1) {  // the others have read this block's sums
    __syncwarp();
    cluster_arrive();
    cluster_wait();
  }
}

// Boxes of 8 rows, 128 columns.
CUtensorMap row_map(const void* matrix, int64_t rows, int64_t columns) {
  const Axis axes[] = {{64, 1, 64}, {rows, columns, kGroupRows}, {columns / 64, 64, kBoxes}};
  return bf16_map(matrix, axes);
}

template <int kWarpgroups>
void launch_for(const MoeFewRowsPlan& plan, const Maps& maps, Arguments a, cudaStream_t stream) {
  const auto kernel = down_kernel<kWarpgroups>;
  constexpr int kMostBytes = 227 * 1024;
  static const bool prepared = (allow_shared_memory(kernel, kMostBytes), true);
  static_cast<void>(prepared);
  const int groups = (a.hidden / kGroupRows + plan.down_clusters - 1) / plan.down_clusters;
  const int beyond = (kWarpgroups * kWarpgroupGroups - groups) * kGroupBytes;
  const int behind = std::max<int>(a.rows * down_sum_bytes(kWarpgroups) + sizeof(Tables), beyond);
  a.stage_bytes = (a.token_groups + groups) * kGroupBytes;
  a.stages = std::clamp(plan.down_ring_bytes / a.stage_bytes, 2,
                        std::min(kMaxStages, (kMostBytes - behind) / a.stage_bytes));
  launch(kernel,
         {.blocks = static_cast<unsigned>(plan.down_clusters * plan.down_splits),
          .threads = kWarpgroups * kWarpgroupThreads + 64,
          .shared_bytes = static_cast<unsigned>(a.stages * a.stage_bytes + behind),
          .cluster = static_cast<unsigned>(plan.down_splits)},
         stream, maps, a);
}

}  // namespace

void moe_down(const MoeFewRowsPlan& plan, const MoeArguments& arguments,
              const MoeFewRowsWorkspace& workspace, cudaStream_t stream) {
  const MoeShape& shape = arguments.shape;
  const Arguments a = {.out = arguments.out,
                       .from = workspace,
                       .rows = arguments.rows,
                       .hidden = shape.hidden,
                       .inter = shape.inter,
                       .shared_inter = shape.shared_inter,
                       .splits = plan.down_splits,
                       .clusters = plan.down_clusters,
                       .stages = 0,
                       .stage_bytes = 0,
                       .token_groups = std::min((arguments.rows + 7) / 8, kTileTokens / 8),
                       .f32 = arguments.out_type == DType::kF32};
  Maps maps;
  maps.weights = row_map(arguments.down, int64_t{shape.num_experts} * shape.hidden, shape.inter);
  maps.tokens =
      row_map(workspace.routed, int64_t{arguments.rows} * shape.experts_per_token, shape.inter);
  maps.shared_weights = maps.weights;
  maps.shared_tokens = maps.tokens;
  if (shape.shared_inter > 0) {
    maps.shared_weights = row_map(arguments.shared_down, shape.hidden, shape.shared_inter);
    maps.shared_tokens = row_map(workspace.shared, arguments.rows, shape.shared_inter);
  }
  if (plan.down_warpgroups == 1) {
    launch_for<1>(plan, maps, a, stream);
  } else {
    launch_for<2>(plan, maps, a, stream);
  }
}

}  // namespace fathom::cuda
