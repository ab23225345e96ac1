// What the warps of index scores' CTA share: the unit of work that they are at, its queries, and a
// ring of pages of keys.
#pragma once

#include <cstdint>

#include "ops/indexer/index_units_cuda.cuh"

namespace fathom::cuda::index_scoring {

inline constexpr int kGroups = 4, kGroupThreads = 128, kGroupWarps = kGroupThreads / kWarp;
inline constexpr int kThreads =
    (kGroups + 1) * kGroupThreads;  // the last group's first warp copies
inline constexpr int kCopyRegisters = 32, kMathRegisters = 112;
inline constexpr int kPairRows = 2;  // that a warpgroup has
inline constexpr int kQueryStages = 2, kKeyStages = 11;
inline constexpr int kKeys = static_cast<int>(kPageSize);
inline constexpr int kRowBytes = kIndexDim;  // of a key or a head
inline constexpr int kSwizzleGroup = 8 * kRowBytes;
static_assert(kBlockRows == kGroups * kPairRows && kMostSliceKeys / kKeys <= kWarp);

// A unit as the copying warp tells it.
struct Task {
  int32_t num_rows = 0;  // 0: there are no more
  int32_t first_row = 0, first_key = 0, num_pages = 0;
  int32_t lengths[kBlockRows] = {};  // 0: the row has no scores
};

template <int kHeads>
struct __align__(1024) Shared {
  uint8_t keys[kKeyStages][kKeys * kRowBytes];
  uint8_t queries[kQueryStages][kBlockRows][kHeads * kRowBytes];
  float weights[kQueryStages][kBlockRows][kHeads];
  float scales[kKeyStages][kKeys];
  Task tasks[kQueryStages];
  uint64_t keys_are_there[kKeyStages], keys_are_read[kKeyStages];
  uint64_t task_is_there[kQueryStages][kGroups];  // a pair of rows each, the first the task too
  uint64_t task_is_done[kQueryStages];
};

// A place in a ring of kStages, and the parity of the turn.
template <int kStages>
class Place {
 public:
  __device__ int stage() const { return stage_; }
  __device__ int parity() const { return parity_; }
  __device__ void advance() {
    if (++stage_ < kStages) return;
    stage_ = 0;
    parity_ ^= 1;
  }

 private:
  int stage_ = 0, parity_ = 0;
};

// The pairs of rows of a block are taken as 1, 2 or 4, so that they divide the warpgroups.
__device__ inline int pairs_of(int num_rows) {
  return num_rows <= kPairRows ? 1 : num_rows <= 2 * kPairRows ? 2 : kGroups;
}

}  // namespace fathom::cuda::index_scoring
