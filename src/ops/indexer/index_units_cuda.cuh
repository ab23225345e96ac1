// The work of index scores, found on the device from the rows' lengths: a unit is a block of up to
// 16 neighbouring rows of one sequence, and a slice of the keys that its last row sees. Units are
// numbered row block by row block; a row that sees no more than `dense_keys` keys in a block of its
// own has none.
#pragma once

#include <cstdint>

#include "device/cuda/rows.cuh"

namespace fathom::cuda {

inline constexpr int kBlockRows = 16;  // that share the keys in shared memory; divides a warp
inline constexpr int kSliceKeys = 256;

struct IndexUnit {
  int32_t first_row = 0, num_rows = 0;
  int32_t first_key = 0;
  bool exists = false;
};

// Each warp finds the same units by itself. Numbers are asked for in ascending order.
class IndexUnits {
 public:
  __device__ IndexUnits(const int32_t* lengths, const int32_t* table_starts, int rows,
                        int dense_keys)
      : lengths_(lengths),
        table_starts_(table_starts),
        rows_(rows),
        dense_keys_(dense_keys),
        lane_(threadIdx.x % kWarp) {
    read();
  }

  __device__ IndexUnit at(int64_t number) {
    while (number - before_ >= total_) {
      before_ += total_;
      first_ += kWarp;
      if (first_ >= rows_) return {};
      read();
    }
    const auto place = static_cast<int32_t>(number - before_);
    const int owner = __ffs(static_cast<int>(__ballot_sync(~0u, sum_ > place))) - 1;
    IndexUnit unit;
    unit.first_row = first_ + owner;
    unit.num_rows = __shfl_sync(~0u, count_, owner);
    unit.first_key = (place - __shfl_sync(~0u, sum_ - units_, owner)) * kSliceKeys;
    unit.exists = true;
    return unit;
  }

 private:
  // The blocks that begin among the warp's rows from first_ on, one a lane at most.
  __device__ void read() {
    const int row = first_ + lane_;
    const int32_t own_length = row < rows_ ? lengths_[row] : 0;
    const int32_t table = row < rows_ ? table_starts_[row] : -1;
    const int32_t table_before = __shfl_up_sync(~0u, table, 1);
    const bool begins = row < rows_ && (lane_ % kBlockRows == 0 || table != table_before);
    const uint32_t heads = __ballot_sync(~0u, begins);
    const uint32_t later = lane_ == kWarp - 1 ? 0 : heads >> (lane_ + 1);
    const int end =
        min(later != 0 ? lane_ + __ffs(static_cast<int>(later)) : kWarp, rows_ - first_);
    count_ = end - lane_;
    const int32_t length = __shfl_sync(~0u, own_length, begins ? end - 1 : lane_);
    units_ = begins && length > dense_keys_ ? (length + kSliceKeys - 1) / kSliceKeys : 0;
    sum_ = units_;
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const int32_t other = __shfl_up_sync(~0u, sum_, distance);
      if (lane_ >= distance) sum_ += other;
    }
    total_ = __shfl_sync(~0u, sum_, kWarp - 1);
  }

  const int32_t* const lengths_;
  const int32_t* const table_starts_;
  const int rows_, dense_keys_, lane_;
  int first_ = 0;                            // row of lane 0
  int64_t before_ = 0;                       // units of earlier rows
  int32_t total_ = 0;                        // units of the warp's rows
  int32_t count_ = 0, units_ = 0, sum_ = 0;  // the lane's: rows, units, units up to them
};

}  // namespace fathom::cuda
