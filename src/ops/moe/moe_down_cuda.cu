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

constexpr int kMapSizes = 4;  // boxes of 8, 16, 32 or 64 tokens
constexpr int kMaxStages = 32;
constexpr int kWarpgroupThreads = 128;
constexpr int kAllUnits = 1 << 20;  // a piece may be as long as its tile

struct Arguments {
  void* out;
  MoeFewRowsWorkspace from;
  int32_t rows, hidden, inter, shared_inter;
  int32_t splits, clusters, stages;
  int32_t groups, token_groups;  // of 8 rows, in a stage: tokens come first, then weights
  bool f32;

  __host__ __device__ int token_bytes() const { return token_groups * kStageHalves * kGroupBytes; }
  __host__ __device__ int stage_bytes() const {
    return token_bytes() + groups * kStageHalves * kGroupBytes;
  }
};

struct Tables {
  uint64_t arrived[kMaxStages], read[kMaxStages], listed;
  int num_tiles;
  TokenTile tiles[kMaxTokenTiles];
};

// Boxes of weights: of as many rows as a cluster has, and of 8 less.
struct Maps {
  CUtensorMap weights[2], shared_weights[2];
  CUtensorMap tokens[kMapSizes], shared_tokens[kMapSizes];
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
  return {a.shared_inter == 0 ? 0 : num_shared_tiles(a.rows),
          max((a.shared_inter + kStageColumns - 1) / kStageColumns, 1), kAllUnits, share.rank,
          a.splits};
}
__device__ Walk routed_walk(const Arguments& a, const Share& share, const Tables& tables) {
  return {tables.num_tiles, (a.inter + kStageColumns - 1) / kStageColumns, kAllUnits, share.rank,
          a.splits};
}

// Of the smallest box that takes so many tokens.
__device__ int map_size(int tokens) {
  return tokens <= 8 ? 0 : tokens <= 16 ? 1 : tokens <= 32 ? 2 : 3;
}

// ---- copies: one thread

class Copies {
 public:
  __device__ Copies(uint8_t* ring, Tables& tables, const Share& share, const Arguments& a)
      : ring_(ring), tables_(tables), share_(share), a_(a), stage_bytes_(a.stage_bytes()) {}

  // Weights of the first stages of the shared expert.
  __device__ void begin(Walk walk, const CUtensorMap* weights) {
    for (Piece piece; ahead_ < a_.stages && walk.next(piece);) {
      const int size = map_size(shared_tile(piece.tile, a_.rows).count);
      for (int k = 0; k < piece.count && ahead_ < a_.stages; ++k) {
        copy_weights(ahead_++, weights, 0, piece.first + k, size);
      }
    }
  }

  __device__ void run(const CUtensorMap* weights, const CUtensorMap* tokens, const Piece& piece,
                      const TokenTile& tile) {
    const int size = map_size(tile.count);
    for (int k = 0; k < piece.count; ++k, ++done_) {
      if (done_ >= a_.stages) barrier_wait(&tables_.read[at_.stage], at_.parity ^ 1);
      if (done_ >= ahead_) copy_weights(at_.stage, weights, tile.expert, piece.first + k, size);
      copy_box(ring_ + at_.stage * stage_bytes_, &tokens[size], &tables_.arrived[at_.stage], 0,
               tile.first, (piece.first + k) * kStageHalves);
      at_.advance(a_.stages);
    }
  }

 private:
  __device__ void copy_weights(int stage, const CUtensorMap* maps, int expert, int k,
                               int size) const {
    uint64_t* arrived = &tables_.arrived[stage];
    barrier_expect(arrived, (share_.num_groups + (1 << size)) * (kStageHalves * kGroupBytes));
    copy_box(ring_ + stage * stage_bytes_ + a_.token_bytes(),
             &maps[share_.num_groups == a_.groups ? 0 : 1], arrived, 0,
             expert * a_.hidden + share_.first_group * kGroupRows, k * kStageHalves);
  }

  uint8_t* const ring_;
  Tables& tables_;
  const Share& share_;
  const Arguments& a_;
  const int stage_bytes_;
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

  __device__ Products(const uint8_t* ring, float* sums, Tables& tables, const Share& share,
                      const Arguments& a)
      : ring_(shared_address(ring)), sums_(sums), tables_(tables), share_(share), a_(a) {
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
    multiply_tile<kColumns, false>(
        d, at_, piece.count, a_.stages, ring_, a_.stage_bytes(),
        {.begin = a_.token_bytes() + warp / 4 * (kWarpgroupGroups * kGroupBytes),
         .half_stride = share_.num_groups * kGroupBytes,
         .group_stride = kGroupBytes},
        {.begin = 0,
         .half_stride = kColumns / kGroupRows * kGroupBytes,
         .group_stride = kGroupBytes},
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
  const Share& share_;
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
  auto* const sums = reinterpret_cast<float*>(memory + a.stages * a.stage_bytes());
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
    Products<kWarpgroups> products(memory, sums, tables, share, a);
    for (Walk walk = shared_walk(a, share); walk.next(piece);) {
      products.run(piece, shared_tile(piece.tile, a.rows), false);
    }
    barrier_wait(&tables.listed, 0);
    for (Walk walk = routed_walk(a, share, tables); walk.next(piece);) {
      products.run(piece, tables.tiles[piece.tile], true);
    }
  } else if (threadIdx.x == kThreads) {
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
  } else if (threadIdx.x >= kThreads + 32) {
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

// Boxes of so many times 8 rows, 128 columns.
CUtensorMap row_map(const void* matrix, int64_t rows, int64_t columns, int groups) {
  const Axis axes[] = {
      {64, 1, 64}, {rows, columns, groups * kGroupRows}, {columns / 64, 64, kStageHalves}};
  return bf16_map(matrix, axes);
}

Maps make_maps(const MoeArguments& arguments, const MoeFewRowsWorkspace& workspace, int groups) {
  const MoeShape& shape = arguments.shape;
  Maps maps;
  const bool shared = shape.shared_inter > 0;
  for (int i = 0; i < 2; ++i) {
    const int less = std::max(groups - i, 1);
    maps.weights[i] =
        row_map(arguments.down, int64_t{shape.num_experts} * shape.hidden, shape.inter, less);
    if (shared) {
      maps.shared_weights[i] =
          row_map(arguments.shared_down, shape.hidden, shape.shared_inter, less);
    }
  }
  for (int size = 0; size < kMapSizes; ++size) {
    maps.tokens[size] = row_map(workspace.routed, int64_t{arguments.rows} * shape.experts_per_token,
                                shape.inter, 1 << size);
    if (shared) {
      maps.shared_tokens[size] =
          row_map(workspace.shared, arguments.rows, shape.shared_inter, 1 << size);
    }
  }
  return maps;
}

template <int kWarpgroups>
void launch_for(const MoeFewRowsPlan& plan, const Maps& maps, Arguments a, cudaStream_t stream) {
  const auto kernel = down_kernel<kWarpgroups>;
  constexpr int kMostBytes = 227 * 1024;
  static const bool prepared = (allow_shared_memory(kernel, kMostBytes), true);
  static_cast<void>(prepared);
  // The last stage's product reads a whole instruction's rows.
  const int beyond = (kWarpgroups * kWarpgroupGroups - a.groups) * (kStageHalves * kGroupBytes);
  const int behind = std::max<int>(a.rows * down_sum_bytes(kWarpgroups) + sizeof(Tables), beyond);
  a.stages = std::clamp(plan.down_ring_bytes / a.stage_bytes(), 2,
                        std::min(kMaxStages, (kMostBytes - behind) / a.stage_bytes()));
  launch(kernel,
         {.blocks = static_cast<unsigned>(plan.down_clusters * plan.down_splits),
          .threads = kWarpgroups * kWarpgroupThreads + 64,
          .shared_bytes = static_cast<unsigned>(a.stages * a.stage_bytes() + behind),
          .cluster = static_cast<unsigned>(plan.down_splits)},
         stream, maps, a);
}

}  // namespace

void moe_down(const MoeFewRowsPlan& plan, const MoeArguments& arguments,
              const MoeFewRowsWorkspace& workspace, cudaStream_t stream) {
  const MoeShape& shape = arguments.shape;
  const int groups = (shape.hidden / kGroupRows + plan.down_clusters - 1) / plan.down_clusters;
  int token_groups = 1;
  while (token_groups * kGroupRows < std::min(arguments.rows, kTileTokens)) token_groups *= 2;
  const Arguments a = {.out = arguments.out,
                       .from = workspace,
                       .rows = arguments.rows,
                       .hidden = shape.hidden,
                       .inter = shape.inter,
                       .shared_inter = shape.shared_inter,
                       .splits = plan.down_splits,
                       .clusters = plan.down_clusters,
                       .stages = 0,
                       .groups = groups,
                       .token_groups = token_groups,
                       .f32 = arguments.out_type == DType::kF32};
  const Maps maps = make_maps(arguments, workspace, groups);
  if (plan.down_warpgroups == 1) {
    launch_for<1>(plan, maps, a, stream);
  } else {
    launch_for<2>(plan, maps, a, stream);
  }
}

}  // namespace fathom::cuda
