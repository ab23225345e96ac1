// The work of index scores, found on the device from the rows' lengths. Neighbouring rows of one
// sequence, up to 8, are a block; a block's work is each page of the keys that its last row sees,
// once for each warpgroup that multiplies it. The blocks' work is numbered in their order, and each
// CTA takes an equal contiguous range of it: a part of a block, or several blocks. A unit is what
// it does at a time: up to 32 neighbouring pages of one block. A row that sees no more than
// `dense_keys` keys in a block of its own has no work.
#pragma once

#include <cstdint>

#include "device/cuda/rows.cuh"
#include "ops/indexer/index_pages_cuda.h"

namespace fathom::cuda {

inline constexpr int kBlockRows = 8;  // that share the keys in shared memory; divides a warp
inline constexpr int kPairRows = 2;   // that a warpgroup has
inline constexpr int kMostUnitPages = kWarp;

// Warpgroups with rows of their own, of four: 1, 2 or 4, so that they divide these.
__device__ inline int pairs_of(int num_rows) {
  return num_rows <= kPairRows ? 1 : num_rows <= 2 * kPairRows ? 2 : kBlockRows / kPairRows;
}

struct IndexUnit {
  int32_t first_row = 0, num_rows = 0;  // no rows: there is no such unit
  int32_t first_page = 0, num_pages = 0;
  int32_t table = 0;   // the sequence's in block_tables
  int32_t length = 0;  // lane i's: of row i; 0: there is none
};

// The units of a CTA, for one warp. A lane counts the work of 8 rows, so that a warp passes 256
// rows for one wait for memory; the rows of the unit that is found are read once more, from the L1
// cache.
class IndexUnits {
 public:
  __device__ IndexUnits(const int32_t* lengths, const int32_t* table_starts, int rows,
                        int dense_keys)
      : lengths_(lengths),
        table_starts_(table_starts),
        rows_(rows),
        dense_keys_(dense_keys),
        lane_(threadIdx.x % kWarp) {
    // Each lane counts an equal part of the rows: that finds where the share begins.
    const int rows_of_lane = (rows + kReadRows - 1) / kReadRows * kBlockRows;
    int32_t work = 0;
    for (int i = 0; i < rows_of_lane; i += kBlockRows) work += work_of(lane_ * rows_of_lane + i);
    work_ = up_to_lane<kWarp>(work);
    const int64_t all = __shfl_sync(~0u, work_, kWarp - 1);
    at_ = static_cast<int32_t>(all * blockIdx.x / gridDim.x);
    end_ = static_cast<int32_t>(all * (blockIdx.x + 1) / gridDim.x);
    if (at_ == end_ || rows_of_lane == kBlockRows) return;
    const int owner = first_lane(work_ > at_);
    before_ = before(work_, owner);
    first_ = owner * rows_of_lane;
    count();
  }

  // The next unit.
  __device__ IndexUnit next() {
    while (at_ < end_) {
      const int32_t all = __shfl_sync(~0u, work_, kWarp - 1);
      if (at_ - before_ >= all) {
        before_ += all;
        first_ += kReadRows;
        count();
        continue;
      }
      const int owner = first_lane(work_ > at_ - before_);
      const IndexUnit unit =
          among_rows(first_ + owner * kBlockRows, before_ + before(work_, owner));
      if (unit.num_pages > 0) return unit;
    }
    return {};
  }

 private:
  static constexpr int kReadRows = kWarp * kBlockRows;
  static constexpr int kKeys = static_cast<int>(kPageSize);

  __device__ int32_t length_of(int row) const { return row < rows_ ? lengths_[row] : 0; }
  __device__ int32_t table_of(int row) const { return row < rows_ ? table_starts_[row] : -1; }
  __device__ int pages_of(int32_t keys) const {
    return keys > dense_keys_ ? (keys + kKeys - 1) / kKeys : 0;
  }
  __device__ static int first_lane(bool is_it) {
    return __ffs(static_cast<int>(__ballot_sync(~0u, is_it))) - 1;
  }
  // Sum over the lanes before `lane`; `up_to_lane`: inclusive prefix sum.
  __device__ static int32_t before(int32_t up_to_lane, int lane) {
    const int32_t sum = __shfl_sync(~0u, up_to_lane, (lane + kWarp - 1) % kWarp);
    return lane > 0 ? sum : 0;
  }
  // The sum over the lanes up to this one, of every kLanes.
  template <int kLanes>
  __device__ int32_t up_to_lane(int32_t x) const {
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) {
      const int32_t other = __shfl_up_sync(~0u, x, distance, kLanes);
      if (lane_ % kLanes >= distance) x += other;
    }
    return x;
  }

  // The work of 8 rows.
  __device__ int32_t work_of(int first) const {
    int32_t length = length_of(first), table = table_of(first), work = 0;
    int begin = 0;
#pragma unroll
    for (int i = 1; i < kBlockRows; ++i) {
      const int32_t next = table_of(first + i);
      if (next != table) {
        work += pages_of(length) * pairs_of(i - begin);
        begin = i;
      }
      table = next;
      length = length_of(first + i);
    }
    return work + pages_of(length) * pairs_of(kBlockRows - begin);
  }

  __device__ void count() { work_ = up_to_lane<kWarp>(work_of(first_ + lane_ * kBlockRows)); }

  // Returns the unit at at_, which lies in the 8 rows from `first` on, and moves at_ past it. The
  // unit has no pages if none begins between at_ and its block's end. `before_rows`: the work
  // before these rows. Every 8 lanes do the same.
  __device__ IndexUnit among_rows(int first, int32_t before_rows) {
    const int i = lane_ % kBlockRows;
    const int32_t length = length_of(first + i), table = table_of(first + i);
    const int32_t table_before = __shfl_up_sync(~0u, table, 1, kBlockRows);
    const bool begins = i == 0 || table != table_before;
    const uint32_t later = (__ballot_sync(~0u, begins) & ((1u << kBlockRows) - 1)) >> (i + 1);
    const int end = later != 0 ? i + __ffs(static_cast<int>(later)) : kBlockRows;
    const int32_t keys = __shfl_sync(~0u, length, end - 1, kBlockRows);
    const int pages = begins ? pages_of(keys) : 0;
    const int32_t work = up_to_lane<kBlockRows>(pages * pairs_of(end - i));
    const int owner = first_lane(work > at_ - before_rows);

    const int32_t before_block = before_rows + before(work, owner);
    const int all_pages = __shfl_sync(~0u, pages, owner);
    IndexUnit unit;
    unit.first_row = first + owner;
    unit.num_rows = __shfl_sync(~0u, end - i, owner);
    unit.table = __shfl_sync(~0u, table, owner);
    const int32_t its_length = __shfl_sync(~0u, length, owner + lane_, kBlockRows);
    unit.length = lane_ < unit.num_rows ? its_length : 0;
    // A page belongs to the share in which its work begins.
    const int pairs = pairs_of(unit.num_rows);
    const auto page_at = [&](int32_t at) { return (at - before_block + pairs - 1) / pairs; };
    unit.first_page = page_at(at_);
    const int stop = min(page_at(end_), all_pages);
    unit.num_pages = min(stop - unit.first_page, kMostUnitPages);
    at_ =
        before_block + (unit.num_pages > 0 ? unit.first_page + unit.num_pages : all_pages) * pairs;
    return unit;
  }

  const int32_t* const lengths_;
  const int32_t* const table_starts_;
  const int rows_, dense_keys_, lane_;
  int32_t at_ = 0, end_ = 0;  // the share that is left
  int first_ = 0;             // row of lane 0
  int32_t before_ = 0;        // the work of earlier rows
  int32_t work_ = 0;          // of the rows up to the lane's last
};

}  // namespace fathom::cuda
