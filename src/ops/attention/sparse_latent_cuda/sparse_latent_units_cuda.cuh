// Work of a launch of sparse latent attention: units of a row and a split of its list, for kernels
// that compute them one after the other as latent decode's splits.
#pragma once

#include <algorithm>
#include <cstddef>

#include "device/cuda/planted_fault.h"
#include "ops/attention/latent_decode_cuda/latent_decode_plan.h"
#include "ops/attention/sparse_latent_cuda/sparse_latent_attention_cuda.h"

namespace fathom::cuda::sparse_latent {

constexpr int kKeys = kSparseTileKeys;

// The kernel arguments that say which keys a row has.
struct Lists {
  const std::byte* pages;
  int64_t page_stride;
  const int32_t* block_tables;
  const int32_t* sequences;
  const int32_t* lengths;
  const int32_t* keys;
  int32_t max_pages, top_k;
  int32_t rows, heads;
  int32_t split_keys, splits;  // most splits of a row
  float* lse;
  FATHOM_PLANTED_FAULT
};

inline Lists lists_of(const SparseLatentArguments& arguments) {
  return {.pages = static_cast<const std::byte*>(arguments.pages),
          .page_stride = arguments.page_stride,
          .block_tables = arguments.block_tables,
          .sequences = arguments.sequences,
          .lengths = arguments.lengths,
          .keys = arguments.keys,
          .max_pages = arguments.max_pages,
          .top_k = arguments.top_k,
          .rows = static_cast<int32_t>(arguments.rows),
          .heads = arguments.heads,
          .split_keys = arguments.split_keys,
          .splits = (arguments.top_k + arguments.split_keys - 1) / arguments.split_keys,
          .lse = arguments.lse};
}

inline int64_t units_of(const Lists& lists) { return int64_t{lists.rows} * lists.splits; }

// Partial results in scratch memory, a slot for each of a row's splits.
struct Scratch {
  float* sums;  // [rows, splits, blocks, 64 * 512 / 2]: pairs of bf16, as the registers hold them
  float* weights;  // [rows, splits, blocks, 64]: log2 of the sums of exponentials
};
inline Scratch scratch_of(const Lists& lists, int blocks, float* scratch) {
  const int64_t slots = units_of(lists) * blocks;
  return {.sums = scratch, .weights = scratch + slots * kSparseSumWords};
}

// A split of a row's list.
struct Unit {
  int row, first;  // entries of the row's list from `first` on
  LatentDecodePart part;

  __device__ const int32_t* keys(const Lists& lists) const {
    return lists.keys + int64_t{row} * lists.top_k + first;
  }
  __device__ const int32_t* block_table(const Lists& lists) const {
    const int sequence = FATHOM_PLANTED(lists, kOtherSequence) ? 0 : lists.sequences[row];
    return lists.block_tables + int64_t{sequence} * lists.max_pages;
  }
};

// Keys of a row's list.
__device__ inline int keys_of(const Lists& lists, int length) {
  const int count = min(__shfl_sync(~0u, length, 0), lists.top_k);
  return FATHOM_PLANTED(lists, kDroppedListKey) && count > 1 ? count - 1 : count;
}

// The list as one sequence of its own, of which a split sees every key. One query row.
__device__ inline Unit unit_of(const Lists& lists, int row, int split, int count) {
  Unit unit;
  unit.row = row;
  unit.first = split * lists.split_keys;
  unit.part = {.rows = lists.heads,
               .out_row = row * lists.heads,
               .kv_len = min(lists.split_keys, count - unit.first),
               .num_queries = 1,
               .split = split,
               .num_splits = (count + lists.split_keys - 1) / lists.split_keys,
               .first_slot = row * lists.splits,
               .first_weight = row * lists.splits};
  unit.part.num_tiles = (unit.part.kv_len + kKeys - 1) / kKeys;
  return unit;
}

// Calls role(unit) for the CTA's only unit, if it has keys, where a launch has a CTA for each unit
// and each of the `blocks` that compute the same rows' heads. The same in every warp.
template <typename Role>
__device__ void for_own_unit(const Lists& lists, int blocks, Role&& role) {
  const int unit = static_cast<int>(blockIdx.x) / blocks;
  const int row = unit % lists.rows, split = unit / lists.rows;
  const int count = keys_of(lists, lists.lengths[row]);
  if (split * lists.split_keys < count) role(unit_of(lists, row, split, count));
}

// Calls role(unit) for every so many of the units, where CTAs are persistent: all rows' first
// splits before the second ones, so that lists of one split are spread over all CTAs. Splits beyond
// the end of a list are skipped.
template <typename Role>
__device__ void for_each_unit(const Lists& lists, int blocks, Role&& role) {
  const int stride = static_cast<int>(gridDim.x) / blocks;
  int row = static_cast<int>(blockIdx.x) / blocks, split = 0;
  const auto carry = [&] {
    for (; row >= lists.rows; row -= lists.rows) ++split;
  };
  const auto length = [&] { return split < lists.splits ? lists.lengths[row] : 0; };
  carry();
  int next = length();  // loaded while the unit before is computed
  while (split < lists.splits) {
    const int its_row = row, its_split = split;
    const int count = keys_of(lists, next);
    row += stride;
    carry();
    next = length();
    if (its_split * lists.split_keys < count) role(unit_of(lists, its_row, its_split, count));
  }
}

// Where the keys of a list lie, for a thread that copies every kStride-th key of a tile, from
// `first` on, kCount of them. Pages are loaded a tile ahead, positions two.
template <int kCount, int kStride>
class KeyPlaces {
 public:
  // `first`: this thread's first key of a tile.
  __device__ KeyPlaces(const Lists& lists, const Unit& unit, int first, int row_bytes)
      : lists_(lists),
        keys_(unit.keys(lists)),
        table_(unit.block_table(lists)),
        first_(first),
        count_(unit.part.kv_len),
        row_bytes_(row_bytes) {
    load_positions(0);
    load_pages();
    load_positions(1);
  }

  // Advances to the next tile: source[i] is this thread's i-th key's row, null beyond the list.
  __device__ void next(const std::byte* (&source)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      source[i] = slot_[i] < 0 ? nullptr
                               : lists_.pages + page_[i] * lists_.page_stride +
                                     static_cast<int64_t>(slot_[i]) * row_bytes_;
    }
    ++tile_;
    load_pages();
    load_positions(tile_ + 1);
  }

 private:
  __device__ void load_positions(int tile) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      int its_tile = tile;
      if (FATHOM_PLANTED(lists_, kBatchOrder) && lists_.rows > 100) {
        if ((tile | 1) < count_ / kKeys) its_tile = tile ^ 1;
      }
      const int at = its_tile * kKeys + first_ + i * kStride;
      position_[i] = at < count_ ? keys_[at] : -1;
    }
  }
  __device__ void load_pages() {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const auto position = static_cast<uint32_t>(position_[i]);
      slot_[i] = position_[i] < 0 ? -1 : static_cast<int32_t>(position % kPageSize);
      page_[i] = position_[i] < 0 ? 0 : table_[position / kPageSize];
      if (FATHOM_PLANTED(lists_, kNeighbourListKey) && first_ + i * kStride == 5) {
        if (slot_[i] > 0) slot_[i] ^= 1;
      }
    }
  }

  const Lists& lists_;
  const int32_t *const keys_, *const table_;
  const int first_, count_, row_bytes_;
  int tile_ = 0;
  int32_t position_[kCount];             // of the tile after the next
  int32_t page_[kCount], slot_[kCount];  // of the next tile
};

}  // namespace fathom::cuda::sparse_latent
