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
inline constexpr int kQueryStages = 2, kKeyStages = 11;
inline constexpr int kKeys = static_cast<int>(kPageSize);
inline constexpr int kRowBytes = kIndexDim;  // of a key or a head
inline constexpr int kSwizzleGroup = 8 * kRowBytes;
static_assert(kBlockRows == kGroups * kPairRows);

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
  // Separate barriers for even and for odd turns of the ring. A warpgroup skips pages that others
  // multiply, so it may wait for a page while the page one turn earlier is still in flight: a
  // barrier shared by all turns would already have the parity that it waits for.
  uint64_t keys_are_there[kKeyStages][2];
  uint64_t keys_are_read[kKeyStages];
  uint64_t task_is_there[kQueryStages][kGroups];  // a pair of rows each, the first the task too
  uint64_t task_is_done[kQueryStages];
};

// A place in a ring of kStages, and how often the ring has turned.
template <int kStages>
class Place {
 public:
  // Behind `passed` others.
  __device__ explicit Place(uint32_t passed = 0)
      : stage_(static_cast<int>(passed % kStages)), turn_(static_cast<int>(passed / kStages)) {}
  __device__ int stage() const { return stage_; }
  __device__ int turn() const { return turn_; }
  __device__ int parity() const { return turn_ & 1; }
  __device__ void advance(int by) {  // less than kStages
    stage_ += by;
    if (stage_ >= kStages) {
      stage_ -= kStages;
      ++turn_;
    }
  }

 private:
  int stage_, turn_;
};

}  // namespace fathom::cuda::index_scoring
