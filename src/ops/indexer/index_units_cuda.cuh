// The work of index scores, found on the device from the rows' lengths: a unit is a block of up to
// 8 neighbouring rows of one sequence, and a slice of the keys that its last row sees. Units are
// numbered row block by row block; a row that sees no more than `dense_keys` keys in a block of its
// own has none.
#pragma once

#include <cstdint>

#include "device/cuda/rows.cuh"
#include "ops/indexer/index_pages_cuda.h"

namespace fathom::cuda {

inline constexpr int kBlockRows = 8;  // that share the keys in shared memory; divides a warp
inline constexpr int kLeastSliceKeys = 256, kMostSliceKeys = 1024;
inline constexpr int kUnitsOfFew = 6, kUnitsOfMany = 2;  // of a CTA, before slices are longer

struct IndexUnit {
  int32_t first_row = 0, num_rows = 0;  // no rows: there is no such unit
  int32_t first_key = 0, num_keys = 0;
  int32_t table = 0;   // the sequence's in block_tables
  int32_t length = 0;  // lane i's: of row i; 0: there is none

  __device__ int num_pages() const {
    constexpr auto kKeys = static_cast<int>(kPageSize);
    return (num_keys + kKeys - 1) / kKeys;
  }
};

// For one warp. Numbers are asked for in ascending order. Slices are of 256 to 1,024 keys, the
// longer the more units there are for each CTA.
class IndexUnits {
 public:
  __device__ IndexUnits(const int32_t* lengths, const int32_t* table_starts, int rows,
                        int dense_keys)
      : lengths_(lengths),
        table_starts_(table_starts),
        rows_(rows),
        dense_keys_(dense_keys),
        lane_(threadIdx.x % kWarp) {
    const int32_t keys = read();
    choose_slices(keys);
    count_units(keys);
  }

  __device__ IndexUnit at(int32_t number) {
    for (;;) {
      const int32_t all = __shfl_sync(~0u, units_, kWarp - 1);
      if (number - before_ < all) break;
      before_ += all;
      first_ += kWarp;
      if (first_ >= rows_) return {};
      count_units(read());
    }
    const int32_t place = number - before_;
    const int owner = __ffs(static_cast<int>(__ballot_sync(~0u, units_ > place))) - 1;
    const int32_t earlier = __shfl_sync(~0u, units_, (owner + kWarp - 1) % kWarp);
    IndexUnit unit;
    unit.first_row = first_ + owner;
    unit.num_rows = __shfl_sync(~0u, count_, owner);
    unit.first_key = (place - (owner > 0 ? earlier : 0)) * slice_keys_;
    const int32_t seen = __shfl_sync(~0u, length_, owner + unit.num_rows - 1);
    unit.num_keys = min(seen - unit.first_key, slice_keys_);
    unit.table = __shfl_sync(~0u, table_, owner);
    const int32_t length = __shfl_sync(~0u, length_, (owner + lane_) % kWarp);
    unit.length = lane_ < unit.num_rows ? length : 0;
    return unit;
  }

 private:
  // The rows from first_ on, one a lane. Returns the keys of the block that begins there; 0: none
  // begins, or it has no scores.
  __device__ int32_t read() {
    const int row = first_ + lane_;
    length_ = row < rows_ ? lengths_[row] : 0;
    table_ = row < rows_ ? table_starts_[row] : -1;
    const int32_t table_before = __shfl_up_sync(~0u, table_, 1);
    const bool begins = row < rows_ && (lane_ % kBlockRows == 0 || table_ != table_before);
    const uint32_t heads = __ballot_sync(~0u, begins);
    const uint32_t later = lane_ == kWarp - 1 ? 0 : heads >> (lane_ + 1);
    const int end =
        min(later != 0 ? lane_ + __ffs(static_cast<int>(later)) : kWarp, rows_ - first_);
    count_ = end - lane_;
    const int32_t keys = __shfl_sync(~0u, length_, begins ? end - 1 : lane_);
    return begins && keys > dense_keys_ ? keys : 0;
  }

  // By the first rows, as if all others were like them. Blocks of several pairs of rows have fewer
  // units: each copies its queries.
  __device__ void choose_slices(int32_t keys_of_block) {
    auto keys = static_cast<float>(keys_of_block);
    int most_rows = keys_of_block > 0 ? count_ : 0;
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
      keys += __shfl_xor_sync(~0u, keys, distance);
      most_rows = max(most_rows, __shfl_xor_sync(~0u, most_rows, distance));
    }
    if (rows_ > kWarp) keys *= static_cast<float>(rows_) / kWarp;
    const float units =
        static_cast<float>(gridDim.x) * (most_rows > 2 ? kUnitsOfMany : kUnitsOfFew);
    slice_keys_ = kMostSliceKeys;
    while (slice_keys_ > kLeastSliceKeys && keys < units * static_cast<float>(slice_keys_)) {
      slice_keys_ /= 2;
    }
  }

  __device__ void count_units(int32_t keys_of_block) {
    units_ = (keys_of_block + slice_keys_ - 1) / slice_keys_;
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const int32_t other = __shfl_up_sync(~0u, units_, distance);
      if (lane_ >= distance) units_ += other;
    }
  }

  const int32_t* const lengths_;
  const int32_t* const table_starts_;
  const int rows_, dense_keys_, lane_;
  int slice_keys_ = 0;
  int first_ = 0;                   // row of lane 0
  int32_t before_ = 0;              // units of earlier rows
  int32_t length_ = 0, table_ = 0;  // the lane's row's
  int32_t count_ = 0;               // rows of the block that begins there
  int32_t units_ = 0;               // of the blocks up to there
};

}  // namespace fathom::cuda
