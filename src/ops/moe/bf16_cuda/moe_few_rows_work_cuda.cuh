// Shared by the few-token MoE kernels, bf16 and e4m3 (moe_few_rows_cuda.cu and
// scaled_moe_few_rows_cuda.cu): the division of work among CTAs, the weight loads, the lists of
// tokens.
//
// A kernel's Arguments, a struct that it takes by value, has
//   static constexpr int kStageColumns;  of k, in a stage
//   static constexpr int kRunUnits;      units of 8 activation columns that share a scale
//   int32_t rows, hidden, num_experts, experts_per_token, inter, shared_inter;
//   int32_t splits, clusters, hidden_groups;    hidden_groups: at most, of a cluster
//   int32_t stages, stage_bytes, token_groups;  token_groups: of 8 rows, in a stage
//   const int32_t* expert_ids;
//   void* out;  [rows, hidden]
//   bool f32;   type of out; otherwise bf16
// its Tables, which lie in shared memory, have
//   uint64_t arrived[kMaxStages], read[kMaxStages];  full and empty barriers of stages
//   uint64_t listed[2];     the lists for the first, the second phase are ready
//   ExpertTiles experts;    followed by ids() and sorted(num_pairs)
#pragma once

#include <cstdint>

#include "device/cuda/ptx.cuh"
#include "device/cuda/tensor_copy.cuh"
#include "ops/linear/weight_stream_cuda.cuh"
#include "ops/moe/bf16_cuda/moe_few_rows_maps_cuda.cuh"
#include "ops/moe/experts_cuda/expert_tiles_cuda.cuh"

namespace fathom::cuda::few_tokens {

inline constexpr int kWarpgroupThreads = 128;
inline constexpr int kMaxStages = 16;
inline constexpr int kWarpgroupPairs = 4;
inline constexpr int kWholeTile = 1 << 20;  // a piece may be as long as its tile

template <typename Arguments>
__device__ int num_pairs(const Arguments& a) {
  return a.rows * a.experts_per_token;
}

template <typename Arguments>
__device__ int token_bytes(const Arguments& a) {  // in a stage
  return a.token_groups * kRowBytes;
}

template <typename Arguments>
__device__ int num_shared_tiles(const Arguments& a) {
  return a.shared_inter == 0 ? 0 : (a.rows + kTileTokens - 1) / kTileTokens;
}

template <typename Arguments>
__device__ int inter_of(const Arguments& a, Phase phase) {
  return phase == kShared ? a.shared_inter : a.inter;
}

template <typename Arguments>
__device__ constexpr int stages_of(int columns) {
  return (columns + Arguments::kStageColumns - 1) / Arguments::kStageColumns;
}

// A CTA's share of the second phase.
struct DownShare {
  int rank, first_group, num_groups;  // groups of 8 hidden columns; num_groups 0: none

  template <typename Arguments>
  __device__ explicit DownShare(const Arguments& a) {
    const int cluster = blockIdx.x / a.splits, groups = a.hidden / kGroupRows;
    rank = blockIdx.x % a.splits;
    first_group = groups * cluster / a.clusters;
    num_groups = cluster < a.clusters ? groups * (cluster + 1) / a.clusters - first_group : 0;
  }
};

// The work items in the order in which all of a CTA's warps go through them.
template <typename Arguments, typename Tables>
class Work {
 public:
  __device__ Work(const Arguments& a, Tables& tables, int most_pairs)
      : a_(a), tables_(tables), most_pairs_(most_pairs), share_(a) {}

  // Routed experts: call only once the lists are ready.
  __device__ Walk gate_up(Phase phase) const {
    constexpr int kRun = Arguments::kRunUnits;
    if constexpr (kRun == 1) {
      return {num_tiles(phase), max(inter_of(a_, phase) / kGroupRows, 1), most_pairs_,
              static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)};
    } else {
      const int units = max(inter_of(a_, phase) / kGroupRows, kRun);
      const int parts = static_cast<int>(gridDim.x);
      return {num_tiles(phase),
              units,
              most_pairs_,
              static_cast<int>(blockIdx.x),
              parts,
              kRun,
              granule(num_tiles(phase) * units, parts)};
    }
  }
  __device__ Walk down(Phase phase) const {
    return {share_.num_groups == 0 ? 0 : num_tiles(phase),
            max(stages_of<Arguments>(inter_of(a_, phase)), 1), kWholeTile, share_.rank, a_.splits};
  }
  __device__ TokenTile tile(Phase phase, const Piece& piece) const {
    if (phase == kRouted) return tables_.experts.tiles[piece.tile];
    const int first = piece.tile * kTileTokens;
    return {static_cast<int16_t>(first), 0,
            static_cast<int16_t>(min(kTileTokens, a_.rows - first))};
  }
  __device__ void wait_for_lists(int of) const { barrier_wait(&tables_.listed[of], 0); }
  __device__ const DownShare& share() const { return share_; }

 private:
  // Whole pieces for all CTAs if that leaves the shares nearly even: multiplying a smaller piece's
  // stages takes longer than loading them.
  __device__ int granule(int units, int parts) const {
    int granule = most_pairs_;
    for (; granule > 1; granule /= 2) {
      const int most = (units / granule + parts - 1) / parts * granule;
      if (most * parts <= units + units / 16) break;
    }
    return granule;
  }
  __device__ int num_tiles(Phase phase) const {
    return phase == kShared ? num_shared_tiles(a_) : tables_.experts.num_tiles;
  }

  const Arguments& a_;
  Tables& tables_;
  const int most_pairs_;
  const DownShare share_;
};

// Weight producer: one thread.
template <typename Arguments, typename Tables>
class WeightCopies {
 public:
  __device__ WeightCopies(uint8_t* ring, Tables& tables, const Work<Arguments, Tables>& work,
                          const Arguments& a)
      : ring_(ring), tables_(tables), work_(work), a_(a) {}

  __device__ void gate_up(Phase phase, const CUtensorMap* maps) {
    Piece piece;
    for (Walk walk = work_.gate_up(phase); walk.next(piece);) {
      const int first = work_.tile(phase, piece).expert * (2 * a_.inter / kGroupRows) + piece.first;
      for (int k = 0; k < stages_of<Arguments>(a_.hidden); ++k) {
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
    return ring_ + at_.stage * a_.stage_bytes + token_bytes(a_);
  }
  __device__ void end_stage() {
    ++done_;
    at_.advance(a_.stages);
  }

  uint8_t* const ring_;
  Tables& tables_;
  const Work<Arguments, Tables>& work_;
  const Arguments& a_;
  const uint64_t policy_ = read_once_policy();
  RingPosition at_;
  int done_ = 0;
};

// Builds the lists: one warpgroup, which synchronizes on this named barrier.
template <typename Arguments, typename Tables>
__device__ void make_lists(Tables& tables, const Work<Arguments, Tables>& work, const Arguments& a,
                           int barrier) {
  ExpertTiles& experts = tables.experts;
  const int pairs = num_pairs(a);
  find_tiles(experts, tables.ids(), a.expert_ids, a.num_experts, pairs, barrier);
  const int warp = threadIdx.x % kGroupingThreads / 32;
  const auto list = [&](const Walk& walk, const auto& is_listed) {
    for (int i = walk.first_tile() + warp; i < walk.end_tile(); i += kGroupingThreads / 32) {
      if (is_listed(i)) continue;
      list_pairs(experts, tables.ids(), pairs, experts.tiles[i], tables.sorted(pairs));
    }
  };
  const Walk up = work.gate_up(kRouted);
  list(up, [](int) { return false; });
  barrier_arrive(&tables.listed[0]);
  list(work.down(kRouted), [&](int i) { return i >= up.first_tile() && i < up.end_tile(); });
  barrier_arrive(&tables.listed[1]);
}

}  // namespace fathom::cuda::few_tokens
