// What: out[t] = mlp_shared(x[t]) + sum over t's experts e of weight * mlp_e(x[t]) for few tokens,
// at the rate at which the weights of the experts that have tokens can be read. One launch.
//
// Inputs/outputs: moe_cuda.h. Which block takes what: moe_few_rows_plan.h.
//
// Layout: a block a multiprocessor: kWarpgroups warpgroups of tensor cores, one that copies tokens'
// rows (cp.async), one that groups, a warp that copies weights (the copy engine). A ring of stages
// (weight_stream_cuda.cuh) of 128 columns: up to 64 tokens, then up to 64 * kWarpgroups rows of
// weights. Beside it the sums [rows, own hidden columns] in fp32, and the lists of
// expert_tiles_cuda.cuh.
//
// Algorithm: two phases in one stream of weights.
//   1. Gate and up. Each block takes an even share of the shared expert's intermediate columns, and
//      then of those of all experts that have tokens, tokens in tiles of 64. A stage has 8 rows of
//      gate and the same 8 of up in turn, so that a thread holds both of an activation.
//      Activations, times the expert's weight, go to the workspace.
//   2. Down. A cluster has a share of the hidden columns, its blocks share the intermediate
//      columns: the shared expert's first, then those of all experts with tokens. What a run of an
//      expert's columns gives is added to the sums of its tokens; at the end the cluster's sums are
//      added up and written.
// Weights wait for nobody: those of the shared expert are on their way before earlier launches have
// ended, those of the second phase while the first one ends. Activations are waited for with two
// counters, one for the shared expert's, which all blocks have finished long before they are
// wanted: so the wait for the last of the other ones is spent on the shared expert's columns.
// Which experts have tokens every block finds for itself, while the shared expert is computed.
//
// Determinism: a pair's place is by expert, then by its index; sums are formed in the order of the
// experts, a cluster's in the order of its blocks. Bits depend on which experts other tokens have:
// a run of columns may end elsewhere. (Atomics count integers.)
//
// Limits: 448 rows (their sums), 256 experts, 4,096 pairs. Blocks wait for one another: all of them
// must be able to run at once.
//
// Source: weights on M for few tokens, lists kept on the device and both products in one launch as
// in HPC-Ops' and FlashInfer's mixture-of-experts kernels for small batches.
//
// Measured: docs/kernels/moe_few_rows.md.
#include <cuda_bf16.h>

#include <algorithm>

#include "device/cuda/cluster.cuh"
#include "device/cuda/launch.h"
#include "device/cuda/ptx.cuh"
#include "device/cuda/tensor_map.h"
#include "ops/linear/few_rows_cuda.h"
#include "ops/linear/weight_stream_cuda.cuh"
#include "ops/moe/expert_tiles_cuda.cuh"
#include "ops/moe/moe_few_rows_cuda.h"

namespace fathom::cuda {
namespace {

constexpr int kWarpgroupThreads = 128;
constexpr int kMaxStages = 16;
constexpr int kRowBytes = kStageHalves * kGroupBytes;  // of 8 rows, in a stage
constexpr int kPairBytes = 2 * kRowBytes;              // of 8 rows of gate and 8 of up
constexpr int kWarpgroupPairs = 4;
constexpr int kPairMaps = 4;         // boxes of 1, 2, 4 or 8 pairs of 8 rows
constexpr int kWholeTile = 1 << 20;  // a piece may be as long as its tile
enum NamedBarrier { kAll, kMultiplying, kCopying, kGrouping };
enum Phase { kShared, kRouted, kNumPhases };  // of activations

struct Arguments {
  const __nv_bfloat16* x;
  const int32_t* expert_ids;
  const float* expert_weights;
  void* out;
  uint64_t* progress;                      // [kNumPhases]
  __nv_bfloat16* activations[kNumPhases];  // [rows, shared_inter], [pairs, inter]
  int32_t rows, hidden, experts_per_token, inter, shared_inter;
  int32_t splits, clusters, hidden_groups;  // hidden_groups: of a cluster, at most
  int32_t stages, stage_bytes, token_groups;
  bool f32;

  __device__ int num_pairs() const { return rows * experts_per_token; }
  __device__ int token_bytes() const { return token_groups * kRowBytes; }
  __device__ int num_shared_tiles() const {
    return shared_inter == 0 ? 0 : (rows + kTileTokens - 1) / kTileTokens;
  }
  __device__ int inter_of(Phase phase) const { return phase == kShared ? shared_inter : inter; }
};

struct Maps {
  CUtensorMap gate_up[kNumPhases][kPairMaps];
  CUtensorMap down[kNumPhases][2];  // boxes of hidden_groups groups of rows, and of one less
};

__device__ constexpr int stages_of(int columns) {
  return (columns + kStageColumns - 1) / kStageColumns;
}

struct Tables {
  uint64_t arrived[kMaxStages], read[kMaxStages];
  uint64_t listed[2];             // the lists are made that the first, the second phase wants
  uint64_t computed[kNumPhases];  // this block's activations; `awaited` is then known
  uint64_t awaited[kNumPhases];   // what progress is when all blocks' are
  ExpertTiles experts;

  __device__ int16_t* ids() { return reinterpret_cast<int16_t*>(this + 1); }
  __device__ uint16_t* sorted(int num_pairs) {
    return reinterpret_cast<uint16_t*>(ids() + num_pairs);
  }
};

// A block's part in the second phase.
struct DownShare {
  int rank, first_group, num_groups;  // of 8 hidden columns; num_groups 0: none

  __device__ explicit DownShare(const Arguments& a) {
    const int cluster = blockIdx.x / a.splits, groups = a.hidden / kGroupRows;
    rank = blockIdx.x % a.splits;
    first_group = groups * cluster / a.clusters;
    num_groups = cluster < a.clusters ? groups * (cluster + 1) / a.clusters - first_group : 0;
  }
};

// The work in the order in which all of a block's warps go through it.
class Work {
 public:
  __device__ Work(const Arguments& a, Tables& tables, int most_pairs)
      : a_(a), tables_(tables), most_pairs_(most_pairs), share_(a) {}

  // Routed: only when the lists are made.
  __device__ Walk gate_up(Phase phase) const {
    return {num_tiles(phase), max(a_.inter_of(phase) / kGroupRows, 1), most_pairs_,
            static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)};
  }
  __device__ Walk down(Phase phase) const {
    return {share_.num_groups == 0 ? 0 : num_tiles(phase), max(stages_of(a_.inter_of(phase)), 1),
            kWholeTile, share_.rank, a_.splits};
  }
  __device__ TokenTile tile(Phase phase, const Piece& piece) const {
    if (phase == kRouted) return tables_.experts.tiles[piece.tile];
    const int first = piece.tile * kTileTokens;
    return {first, 0, static_cast<int16_t>(min(kTileTokens, a_.rows - first))};
  }
  __device__ void wait_for_lists(int of) const { barrier_wait(&tables_.listed[of], 0); }
  __device__ const DownShare& share() const { return share_; }

 private:
  __device__ int num_tiles(Phase phase) const {
    return phase == kShared ? a_.num_shared_tiles() : tables_.experts.num_tiles;
  }

  const Arguments& a_;
  Tables& tables_;
  const int most_pairs_;
  const DownShare share_;
};

// ---- weights: one thread

class WeightCopies {
 public:
  __device__ WeightCopies(uint8_t* ring, Tables& tables, const Work& work, const Arguments& a)
      : ring_(ring), tables_(tables), work_(work), a_(a) {}

  __device__ void gate_up(Phase phase, const CUtensorMap* maps) {
    Piece piece;
    for (Walk walk = work_.gate_up(phase); walk.next(piece);) {
      const int first = work_.tile(phase, piece).expert * (2 * a_.inter / kGroupRows) + piece.first;
      for (int k = 0; k < stages_of(a_.hidden); ++k) {
        uint64_t* arrived = begin_stage(piece.count * kPairBytes);
        int done = 0;
        for (int size = kPairMaps - 1; size >= 0; --size) {
          if ((piece.count >> size & 1) == 0) continue;
          copy_box_under(policy_, weights() + done * kPairBytes, &maps[size], arrived, 0, 0,
                         k * kStageHalves, 0, first + done);
          done += 1 << size;
        }
        end_stage();
      }
    }
  }

  __device__ void down(Phase phase, const CUtensorMap* maps) {
    const DownShare& share = work_.share();
    Piece piece;
    for (Walk walk = work_.down(phase); walk.next(piece);) {
      const int row = work_.tile(phase, piece).expert * a_.hidden + share.first_group * kGroupRows;
      for (int k = 0; k < piece.count; ++k) {
        uint64_t* arrived = begin_stage(share.num_groups * kRowBytes);
        copy_box_under(policy_, weights(), &maps[share.num_groups == a_.hidden_groups ? 0 : 1],
                       arrived, 0, row, (piece.first + k) * kStageHalves);
        end_stage();
      }
    }
  }

 private:
  __device__ uint64_t* begin_stage(int bytes) {
    if (done_ >= a_.stages) barrier_wait(&tables_.read[at_.stage], at_.parity ^ 1);
    barrier_expect(&tables_.arrived[at_.stage], bytes);
    return &tables_.arrived[at_.stage];
  }
  __device__ uint8_t* weights() const {
    return ring_ + at_.stage * a_.stage_bytes + a_.token_bytes();
  }
  __device__ void end_stage() {
    ++done_;
    at_.advance(a_.stages);
  }

  uint8_t* const ring_;
  Tables& tables_;
  const Work& work_;
  const Arguments& a_;
  const uint64_t policy_ = read_once_policy();
  RingPosition at_;
  int done_ = 0;
};

// ---- tokens: one warpgroup
//
// A thread copies the same 16 bytes of 128 columns of every eighth row.

class TokenCopies {
 public:
  __device__ TokenCopies(uint8_t* ring, Tables& tables, const Work& work, const Arguments& a)
      : ring_(shared_address(ring)),
        tables_(tables),
        work_(work),
        a_(a),
        chunk_(threadIdx.x % 16),
        row_(threadIdx.x % kWarpgroupThreads / 16) {}

  __device__ void gate_up(Phase phase) {
    Piece piece;
    for (Walk walk = work_.gate_up(phase); walk.next(piece);) {
      const TokenTile tile = work_.tile(phase, piece);
      const uint16_t* sorted = tables_.sorted(a_.num_pairs());
      copy(tile.count, 0, stages_of(a_.hidden), a_.hidden, [&](int row) {
        const int place = tile.first + row;
        const int token = phase == kShared ? place : sorted[place] / a_.experts_per_token;
        return a_.x + static_cast<int64_t>(token) * a_.hidden;
      });
    }
  }

  __device__ void down(Phase phase) {
    const int inter = a_.inter_of(phase);
    Piece piece;
    for (Walk walk = work_.down(phase); walk.next(piece);) {
      const TokenTile tile = work_.tile(phase, piece);
      copy(tile.count, piece.first * kStageColumns, piece.count, inter, [&](int row) {
        return a_.activations[phase] + static_cast<int64_t>(tile.first + row) * inter;
      });
    }
  }

  // For all blocks' activations.
  __device__ void wait_for(Phase phase) const {
    if (threadIdx.x % kWarpgroupThreads == 0) {
      barrier_wait(&tables_.computed[phase], 0);
      while (load_acquire(&a_.progress[phase]) < tables_.awaited[phase]) {
      }
    }
    named_barrier(kCopying, kWarpgroupThreads);
  }

 private:
  static constexpr int kEach = kTileTokens / kGroupRows;

  // Columns from first_column of row_at(0 … rows).
  template <typename RowAt>
  __device__ void copy(int rows, int first_column, int num_stages, int columns, RowAt row_at) {
    const __nv_bfloat16* from[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int row = i * kGroupRows + row_;
      from[i] = row < rows ? row_at(row) : nullptr;
    }
    const uint32_t to =
        ring_ + chunk_ / 8 * (a_.token_groups * kGroupBytes) + swizzled_chunk(row_, chunk_ % 8);
    for (int k = 0; k < num_stages; ++k) {
      if (done_ >= a_.stages) barrier_wait(&tables_.read[at_.stage], at_.parity ^ 1);
      const int column = first_column + k * kStageColumns + chunk_ * 8;
      const bool exists = column < columns;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        if (from[i] == nullptr) continue;
        copy_16_or_zero(to + at_.stage * a_.stage_bytes + i * kGroupBytes,
                        from[i] + (exists ? column : 0), exists ? 16 : 0);
      }
      barrier_arrive_after_copies(&tables_.arrived[at_.stage]);
      ++done_;
      at_.advance(a_.stages);
    }
  }

  const uint32_t ring_;
  Tables& tables_;
  const Work& work_;
  const Arguments& a_;
  const int chunk_, row_;
  RingPosition at_;
  int done_ = 0;
};

// ---- products

__device__ float swiglu(float gate, float up) {
  constexpr float kLog2E = 1.4426950408889634f;
  return gate / (1 + exp2_fast(-gate * kLog2E)) * up;
}

// Calls f with the number of columns of the smallest instruction that takes so many tokens.
template <typename F>
__device__ void with_columns(int tokens, F&& f) {
  if (tokens <= 8) {
    f.template operator()<8>();
  } else if (tokens <= 16) {
    f.template operator()<16>();
  } else if (tokens <= 32) {
    f.template operator()<32>();
  } else {
    f.template operator()<64>();
  }
}

template <int kWarpgroups>
class Products {
 public:
  static constexpr int kThreads = kWarpgroups * kWarpgroupThreads;
  static constexpr int kStride = moe_sum_bytes(kWarpgroups) / 4;  // of a row of sums

  __device__ Products(const uint8_t* ring, float* sums, Tables& tables, const Work& work,
                      const Arguments& a)
      : ring_(shared_address(ring)),
        sums_(sums),
        tables_(tables),
        work_(work),
        a_(a),
        lane_(threadIdx.x % 32),
        warp_(threadIdx.x / 32) {
    for (int i = threadIdx.x; i < a.rows * kStride / 4; i += kThreads) {
      reinterpret_cast<float4*>(sums)[i] = make_float4(0, 0, 0, 0);
    }
  }

  __device__ void gate_up(Phase phase) {
    Piece piece;
    for (Walk walk = work_.gate_up(phase); walk.next(piece);) {
      const TokenTile tile = work_.tile(phase, piece);
      with_columns(tile.count, [&]<int kColumns>() { gate_up<kColumns>(phase, piece, tile); });
    }
    named_barrier(kMultiplying, kThreads);
    if (threadIdx.x == 0) {
      const uint64_t before = add_release(&a_.progress[phase], 1);
      tables_.awaited[phase] = (before / gridDim.x + 1) * gridDim.x;
      barrier_arrive(&tables_.computed[phase]);
    }
  }

  __device__ void down(Phase phase) {
    Piece piece;
    for (Walk walk = work_.down(phase); walk.next(piece);) {
      const TokenTile tile = work_.tile(phase, piece);
      with_columns(tile.count, [&]<int kColumns>() { down<kColumns>(phase, piece, tile); });
    }
  }

  // This block's share of the cluster's rows and columns, when all blocks of the cluster have
  // their sums.
  __device__ void write_out() const {
    const DownShare& share = work_.share();
    const int vectors = 2 * share.num_groups;  // of four columns, in a row
    const int all = a_.rows * vectors, end = all * (share.rank + 1) / a_.splits;
    for (int i = all * share.rank / a_.splits + threadIdx.x; i < end; i += kThreads) {
      const int row = i / vectors, column = i % vectors * 4;
      const uint32_t address = shared_address(sums_ + row * kStride + column);
      float4 sum = make_float4(0, 0, 0, 0);
      for (int block = 0; block < a_.splits; ++block) {
        const float4 part = load_from_block(address_in_block(address, block));
        sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
      }
      const int64_t at = static_cast<int64_t>(row) * a_.hidden + share.first_group * 8 + column;
      if (a_.f32) {
        *reinterpret_cast<float4*>(static_cast<float*>(a_.out) + at) = sum;
      } else {
        *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(a_.out) + at) =
            make_uint2(pack_bf16(sum.x, sum.y), pack_bf16(sum.z, sum.w));
      }
    }
  }

 private:
  // The token of a thread's i-th column.
  __device__ int column_of(int i) const { return i / 2 * 8 + 2 * (lane_ % 4) + i % 2; }

  template <int kColumns>
  __device__ void multiply(float (&d)[kColumns / 2], int num_stages, const StageOperand& weights) {
    multiply_tile<kColumns, true>(
        d, at_, num_stages, a_.stages, ring_, a_.stage_bytes, weights,
        {.begin = 0, .half_stride = a_.token_groups * kGroupBytes, .group_stride = kGroupBytes},
        tables_.arrived, tables_.read);
  }

  template <int kColumns>
  __device__ void gate_up(Phase phase, const Piece& piece, const TokenTile& tile) {
    float weight[kColumns / 4];
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i) {
      weight[i] = 1;
      if (phase == kRouted && column_of(i) < tile.count) {
        weight[i] = a_.expert_weights[tables_.sorted(a_.num_pairs())[tile.first + column_of(i)]];
      }
    }
    float d[kColumns / 2];
    multiply<kColumns>(d, stages_of(a_.hidden),
                       {.begin = a_.token_bytes() + warp_ / 4 * (kWarpgroupPairs * kPairBytes),
                        .half_stride = kGroupBytes,
                        .group_stride = kRowBytes});
    if (warp_ >= piece.count) return;  // a warp has the 16 rows of one pair
    const int inter = a_.inter_of(phase);
    __nv_bfloat16* out = a_.activations[phase] + static_cast<int64_t>(tile.first) * inter +
                         (piece.first + warp_) * kGroupRows + lane_ / 4;
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i) {
      const int j = i / 2 * 4 + i % 2;
      if (column_of(i) < tile.count) {
        out[static_cast<int64_t>(column_of(i)) * inter] =
            __float2bfloat16(swiglu(d[j], d[j + 2]) * weight[i]);
      }
    }
  }

  template <int kColumns>
  __device__ void down(Phase phase, const Piece& piece, const TokenTile& tile) {
    int token[kColumns / 4];
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i) {
      token[i] = -1;
      if (column_of(i) >= tile.count) continue;
      const int place = tile.first + column_of(i);
      token[i] =
          phase == kShared ? place : tables_.sorted(a_.num_pairs())[place] / a_.experts_per_token;
    }
    float d[kColumns / 2];
    multiply<kColumns>(d, piece.count,
                       {.begin = a_.token_bytes() + warp_ / 4 * (kWarpgroupGroups * kGroupBytes),
                        .half_stride = work_.share().num_groups * kGroupBytes,
                        .group_stride = kGroupBytes});
    // A warp alone has these columns of all rows.
    float* sums = sums_ + warp_ * 16 + lane_ / 4;
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
  const Work& work_;
  const Arguments& a_;
  const int lane_, warp_;
  RingPosition at_;
};

// ---- lists: one warpgroup

__device__ void make_lists(Tables& tables, const Work& work, const Arguments& a) {
  ExpertTiles& experts = tables.experts;
  const int num_pairs = a.num_pairs();
  find_tiles(experts, tables.ids(), a.expert_ids, num_pairs, kGrouping);
  const int warp = threadIdx.x % kGroupingThreads / 32;
  const auto list = [&](const Walk& walk, const auto& is_listed) {
    for (int i = walk.first_tile() + warp; i < walk.end_tile(); i += kGroupingThreads / 32) {
      if (is_listed(i)) continue;
      list_pairs(experts, tables.ids(), num_pairs, experts.tiles[i], tables.sorted(num_pairs));
    }
  };
  const Walk up = work.gate_up(kRouted);
  list(up, [](int) { return false; });
  barrier_arrive(&tables.listed[0]);
  list(work.down(kRouted), [&](int i) { return i >= up.first_tile() && i < up.end_tile(); });
  barrier_arrive(&tables.listed[1]);
}

// ---- the kernel

template <int kWarpgroups>
__global__ void __launch_bounds__((kWarpgroups + 2) * kWarpgroupThreads + 32, 1)
    moe_few_rows_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Arguments a) {
  constexpr int kMultiply = kWarpgroups * kWarpgroupThreads;
  constexpr int kCopy = kMultiply + kWarpgroupThreads, kGroup = kCopy + kWarpgroupThreads;
  extern __shared__ __align__(1024) uint8_t memory[];
  auto* const sums = reinterpret_cast<float*>(memory + a.stages * a.stage_bytes);
  Tables& tables = *reinterpret_cast<Tables*>(sums + a.rows * Products<kWarpgroups>::kStride);
  if (threadIdx.x == 0) {
    for (int i = 0; i < a.stages; ++i) {
      barrier_init(&tables.arrived[i], kWarpgroupThreads + 1);
      barrier_init(&tables.read[i], kWarpgroups * 4);
    }
    for (uint64_t& listed : tables.listed) barrier_init(&listed, kGroupingThreads);
    for (uint64_t& computed : tables.computed) barrier_init(&computed, 1);
    fence_barrier_init();
    let_next_launch_begin();
  }
  __syncthreads();

  const Work work(a, tables, kWarpgroups * kWarpgroupPairs);
  if (threadIdx.x < kMultiply) {
    wait_for_earlier_launches();
    Products<kWarpgroups> products(memory, sums, tables, work, a);
    products.gate_up(kShared);
    work.wait_for_lists(0);
    products.gate_up(kRouted);
    products.down(kShared);
    work.wait_for_lists(1);
    products.down(kRouted);
    if (a.splits > 1) {
      cluster_arrive();
      cluster_wait();
    } else {
      named_barrier(kMultiplying, kMultiply);
    }
    products.write_out();
  } else {
    if (threadIdx.x < kCopy) {
      wait_for_earlier_launches();
      TokenCopies copies(memory, tables, work, a);
      copies.gate_up(kShared);
      work.wait_for_lists(0);
      copies.gate_up(kRouted);
      copies.wait_for(kShared);
      copies.down(kShared);
      copies.wait_for(kRouted);
      copies.down(kRouted);
    } else if (threadIdx.x < kGroup) {
      wait_for_earlier_launches();
      make_lists(tables, work, a);
    } else if (threadIdx.x == kGroup) {
      WeightCopies copies(memory, tables, work, a);
      copies.gate_up(kShared, maps.gate_up[kShared]);
      work.wait_for_lists(0);
      copies.gate_up(kRouted, maps.gate_up[kRouted]);
      copies.down(kShared, maps.down[kShared]);
      copies.down(kRouted, maps.down[kRouted]);
    }
    __syncwarp();
    if (a.splits > 1) {
      cluster_arrive();
      cluster_wait();
    }
  }
  if (a.splits > 1) {  // the others have read this block's sums
    __syncwarp();
    cluster_arrive();
    cluster_wait();
  }
}

// Boxes of 1, 2, 4 and 8 times 8 rows of gate and the same of up, 128 columns.
void make_pair_maps(CUtensorMap* maps, const void* matrix, int64_t experts, int64_t inter,
                    int64_t hidden) {
  for (int size = 0; size < kPairMaps; ++size) {
    const Axis axes[] = {{64, 1, 64},
                         {8, hidden, 8},
                         {hidden / 64, 64, kStageHalves},
                         {2, inter * hidden, 2},
                         // The last up's rows are the first one's, `inter` further: no box begins
                         // there.
                         {(2 * experts - 1) * inter / 8, 8 * hidden, 1 << size}};
    maps[size] = bf16_map(matrix, axes);
  }
}

void make_row_maps(CUtensorMap* maps, const void* matrix, int64_t rows, int64_t columns,
                   int groups) {
  for (int i = 0; i < 2; ++i) {
    const Axis axes[] = {{64, 1, 64},
                         {rows, columns, std::max(groups - i, 1) * kGroupRows},
                         {columns / 64, 64, kStageHalves}};
    maps[i] = bf16_map(matrix, axes);
  }
}

Maps make_maps(const MoeArguments& arguments, int groups) {
  const MoeShape& s = arguments.shape;
  Maps maps;
  make_pair_maps(maps.gate_up[kRouted], arguments.gate_up, s.num_experts, s.inter, s.hidden);
  make_row_maps(maps.down[kRouted], arguments.down, int64_t{s.num_experts} * s.hidden, s.inter,
                groups);
  if (s.shared_inter > 0) {
    make_pair_maps(maps.gate_up[kShared], arguments.shared_gate_up, 1, s.shared_inter, s.hidden);
    make_row_maps(maps.down[kShared], arguments.shared_down, s.hidden, s.shared_inter, groups);
  }
  return maps;
}

template <int kWarpgroups>
void launch_for(const MoeFewRowsPlan& plan, const Maps& maps, Arguments a, cudaStream_t stream) {
  const auto kernel = moe_few_rows_kernel<kWarpgroups>;
  static const bool prepared = (allow_shared_memory(kernel, kMoeSharedBytes), true);
  static_cast<void>(prepared);
  const int pairs = a.rows * a.experts_per_token;
  static_assert(sizeof(Tables) <= moe_table_bytes(0));
  const int behind = a.rows * moe_sum_bytes(kWarpgroups) + moe_table_bytes(pairs);
  a.stage_bytes = moe_stage_bytes(a.rows, kWarpgroups);
  a.stages = std::clamp(plan.ring_bytes / a.stage_bytes, 2, kMaxStages);
  launch(kernel,
         {.blocks = static_cast<unsigned>(plan.blocks),
          .threads = (kWarpgroups + 2) * kWarpgroupThreads + 32,
          .shared_bytes = static_cast<unsigned>(a.stages * a.stage_bytes + behind),
          .cluster = static_cast<unsigned>(plan.splits)},
         stream, maps, a);
}

const ClusterCounts& cluster_counts() {
  static const ClusterCounts counts = count_clusters();
  return counts;
}

int64_t shared_activation_bytes(const MoeShape& shape, int64_t rows) {
  constexpr int64_t kAlignment = 1024;
  return (rows * shape.shared_inter * 2 + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

int64_t moe_few_rows_workspace_bytes(const MoeShape& shape, int32_t rows) {
  return shared_activation_bytes(shape, rows) +
         int64_t{rows} * shape.experts_per_token * shape.inter * 2;
}

int moe_few_rows_blocks() {
  return plan_moe_few_rows({.rows = 1, .hidden = 64}, cluster_counts()).blocks;
}

void moe_few_rows(const MoeFewRowsPlan& plan, const MoeArguments& arguments, cudaStream_t stream) {
  const MoeShape& shape = arguments.shape;
  Arguments a = {};
  a.x = static_cast<const __nv_bfloat16*>(arguments.x);
  a.expert_ids = arguments.expert_ids;
  a.expert_weights = arguments.expert_weights;
  a.out = arguments.out;
  a.progress = arguments.progress;
  a.activations[kShared] = static_cast<__nv_bfloat16*>(arguments.workspace);
  a.activations[kRouted] = reinterpret_cast<__nv_bfloat16*>(
      static_cast<char*>(arguments.workspace) + shared_activation_bytes(shape, arguments.rows));
  a.rows = arguments.rows;
  a.hidden = shape.hidden;
  a.experts_per_token = shape.experts_per_token;
  a.inter = shape.inter;
  a.shared_inter = shape.shared_inter;
  a.splits = plan.splits;
  a.clusters = plan.clusters;
  a.hidden_groups = plan.hidden_groups(shape.hidden);
  a.token_groups =
      std::min((arguments.rows + kGroupRows - 1) / kGroupRows, kTileTokens / kGroupRows);
  a.f32 = arguments.out_type == DType::kF32;
  const Maps maps = make_maps(arguments, a.hidden_groups);
  if (plan.warpgroups == 1) {
    launch_for<1>(plan, maps, a, stream);
  } else {
    launch_for<2>(plan, maps, a, stream);
  }
}

void moe_few_rows(const MoeArguments& arguments, cudaStream_t stream) {
  const MoeShape& shape = arguments.shape;
  moe_few_rows(plan_moe_few_rows({.rows = arguments.rows,
                                  .hidden = shape.hidden,
                                  .num_experts = shape.num_experts,
                                  .experts_per_token = shape.experts_per_token,
                                  .inter = shape.inter,
                                  .shared_inter = shape.shared_inter},
                                 cluster_counts()),
               arguments, stream);
}

}  // namespace fathom::cuda
