// The tokens of each expert, listed by every CTA for itself: (token, expert) pairs sorted by
// expert, in tiles of up to 64.
#pragma once

#include <cstdint>

#include "device/cuda/ptx.cuh"
#include "ops/moe/plans/moe_few_rows_plan.h"

namespace fathom::cuda {

inline constexpr int kTileTokens = 64;  // N of a wgmma, at most
inline constexpr int kMaxPairs = 4096;
inline constexpr int kMaxTokenTiles = kMostMoeExperts + kMaxPairs / kTileTokens;

// Up to kTileTokens tokens of one expert: places first … first + count of the sorted pairs. Six
// bytes: the lists of kMostMoeExperts experts fit moe_table_bytes().
struct TokenTile {
  int16_t first, expert, count;
};

// In shared memory. ids and sorted: [num_pairs]; sorted holds the pairs of the CTA's own tiles, by
// place.
struct ExpertTiles {
  int num_tiles;
  TokenTile tiles[kMaxTokenTiles];  // by expert
  int places[kMostMoeExperts];      // per expert: its number of pairs, then its first pair's place
};

// A run of units (8 intermediate columns, or 128) of one token tile.
struct Piece {
  int tile, first, count;
};

// One of `parts` even shares of the units of all token tiles, each of which has `units_a_tile`.
// Shares are cut at multiples of `granule`, and into pieces of up to `most`, none of them across a
// multiple of `run`. run divides units_a_tile, granule divides run.
class Walk {
 public:
  __device__ Walk(int num_tiles, int units_a_tile, int most, int part, int parts)
      : Walk(num_tiles, units_a_tile, most, part, parts, units_a_tile, 1) {}
  __device__ Walk(int num_tiles, int units_a_tile, int most, int part, int parts, int run,
                  int granule)
      : units_a_tile_(units_a_tile), most_(most), run_(run) {
    const unsigned granules = static_cast<unsigned>(num_tiles * units_a_tile) / granule;
    const int unit = static_cast<int>(granules * part / parts * granule);
    left_ = static_cast<int>(granules * (part + 1) / parts * granule) - unit;
    tile_ = unit / units_a_tile;
    first_ = unit - tile_ * units_a_tile;
    in_run_ = first_ % run;
  }

  // Divides only at cuts, because all producer and consumer threads call this for every piece.
  __device__ bool next(Piece& piece) {
    if (left_ == 0) return false;
    int count = min(left_, run_ - in_run_);
    if (count > most_) {
      const int pieces = (count + most_ - 1) / most_;
      count = (count + pieces - 1) / pieces;
    }
    piece = {tile_, first_, count};
    left_ -= count;
    if ((in_run_ += count) == run_) in_run_ = 0;
    if ((first_ += count) == units_a_tile_) {
      first_ = 0;
      ++tile_;
    }
    return true;
  }

  // Token tiles [first_tile, end_tile) contain the remaining units.
  __device__ int first_tile() const { return tile_; }
  __device__ int end_tile() const {
    return left_ > 0 ? tile_ + (first_ + left_ - 1) / units_a_tile_ + 1 : tile_;
  }

 private:
  int left_, tile_, first_, in_run_, units_a_tile_, most_, run_;
};

// ---- building the lists: one warpgroup, `barrier` is its named barrier

inline constexpr int kGroupingThreads = 128;

// Places and tiles of all experts from their pair counts, by one warp.
__device__ inline void place_experts(ExpertTiles& experts, int num_experts) {
  const int lane = threadIdx.x % 32, each = (num_experts + 31) / 32;
  // Pairs in the lower half, tiles in the upper.
  const auto both = [](int count) { return count | (count + kTileTokens - 1) / kTileTokens << 16; };
  int sum = 0;
#pragma unroll 8
  for (int i = 0; i < each; ++i) sum += both(experts.places[lane * each + i]);
  int before = sum;
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(~0u, before, distance);
    if (lane >= distance) before += other;
  }
  if (lane == 31) experts.num_tiles = before >> 16;
  before -= sum;
  for (int i = 0; i < each; ++i) {
    const int expert = lane * each + i, count = experts.places[expert];
    experts.places[expert] = before & 0xFFFF;
    for (int first = 0; first < count; first += kTileTokens) {
      experts.tiles[(before >> 16) + first / kTileTokens] = {
          static_cast<int16_t>((before & 0xFFFF) + first), static_cast<int16_t>(expert),
          static_cast<int16_t>(min(kTileTokens, count - first))};
    }
    before += both(count);
  }
}

// ids: a copy of expert_ids. -1: no expert.
__device__ inline void find_tiles(ExpertTiles& experts, int16_t* ids, const int32_t* expert_ids,
                                  int num_experts, int num_pairs, int barrier) {
  const int thread = threadIdx.x % kGroupingThreads;
  // A lane's share of place_experts() may reach beyond the last expert.
  for (int i = thread; i < (num_experts + 31) / 32 * 32; i += kGroupingThreads) {
    experts.places[i] = 0;
  }
  named_barrier(barrier, kGroupingThreads);
  for (int i = thread; i < num_pairs; i += kGroupingThreads) {
    const int id = expert_ids[i];
    ids[i] = static_cast<int16_t>(id);
    if (id >= 0) atomicAdd(&experts.places[id], 1);
  }
  named_barrier(barrier, kGroupingThreads);
  if (thread < 32) place_experts(experts, num_experts);
  named_barrier(barrier, kGroupingThreads);
}

// Writes the pairs of one tile to sorted[first …], in the order of their index, by one warp.
__device__ inline void list_pairs(const ExpertTiles& experts, const int16_t* ids, int num_pairs,
                                  const TokenTile& tile, uint16_t* sorted) {
  const int lane = threadIdx.x % 32;
  int place = experts.places[tile.expert];
  for (int base = 0; base < num_pairs; base += 32) {
    const int pair = base + lane;
    const bool is_one = pair < num_pairs && ids[pair] == tile.expert;
    const unsigned ones = __ballot_sync(~0u, is_one);
    const int mine = place + __popc(ones & ((1u << lane) - 1));
    if (is_one && mine >= tile.first && mine < tile.first + tile.count) {
      sorted[mine] = static_cast<uint16_t>(pair);
    }
    place += __popc(ones);
  }
  __syncwarp();
}

}  // namespace fathom::cuda
