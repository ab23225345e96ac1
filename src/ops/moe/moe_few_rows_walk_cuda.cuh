// How a block of moe_few_rows goes through its share of the work: all of its warps alike.
#pragma once

#include "ops/moe/moe_few_rows_parts_cuda.h"

namespace fathom::cuda {

// A run of units (8 intermediate columns, or 128) of one token tile.
struct Piece {
  int tile, first, count;
};

// Units [begin, end) of token tiles that have `units_a_tile` each, cut evenly into pieces of up to
// `most`.
class Walk {
 public:
  __device__ Walk(int num_tiles, int units_a_tile, int most, int part, int parts)
      : units_a_tile_(units_a_tile), most_(most) {
    const int64_t units = static_cast<int64_t>(num_tiles) * units_a_tile;
    unit_ = static_cast<int>(units * part / parts);
    end_ = static_cast<int>(units * (part + 1) / parts);
  }

  __device__ bool next(Piece& piece) {
    if (unit_ >= end_) return false;
    piece.tile = unit_ / units_a_tile_;
    piece.first = unit_ - piece.tile * units_a_tile_;
    const int left = min(end_ - unit_, units_a_tile_ - piece.first);
    const int pieces = (left + most_ - 1) / most_;
    piece.count = (left + pieces - 1) / pieces;
    unit_ += piece.count;
    return true;
  }

  // Token tiles [first_tile, end_tile) have units in it.
  __device__ int first_tile() const { return unit_ / units_a_tile_; }
  __device__ int end_tile() const {
    return unit_ < end_ ? (end_ - 1) / units_a_tile_ + 1 : first_tile();
  }
  // Whether it has the tile's first unit.
  __device__ bool begins(int tile) const {
    return tile * units_a_tile_ >= unit_ && tile * units_a_tile_ < end_;
  }

 private:
  int unit_, end_, units_a_tile_, most_;
};

// All tokens, for the shared expert.
__device__ inline TokenTile shared_tile(int tile, int rows) {
  const int first = tile * kTileTokens;
  return {first, 0, static_cast<int16_t>(min(kTileTokens, rows - first))};
}

__host__ __device__ constexpr int num_shared_tiles(int rows) {
  return (rows + kTileTokens - 1) / kTileTokens;
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

}  // namespace fathom::cuda
