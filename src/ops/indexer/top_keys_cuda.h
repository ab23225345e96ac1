// The exact choice of a row's keys on a Hopper GPU: select_top_keys() and select_all_keys() of
// ops/indexer/top_keys.h, with the same order of scores and the same lists.
#pragma once

#include <cstdint>

#include "device/cuda/gpu_stream.h"
#include "device/cuda/planted_fault.h"

namespace fathom::cuda {

// All pointers are device memory. Row r sees the keys [first_key, lengths[r]) of its sequence.
struct TopKeysArguments {
  const float* scores = nullptr;  // [rows, columns], rows aligned to 16 bytes
  int64_t columns = 0;            // at least any length; a multiple of 4
  const int32_t* lengths = nullptr;
  int32_t* keys = nullptr;  // [rows, k]: min(k, visible) positions ascending, then -1
  int32_t rows = 0;
  int32_t k = 0;
  int32_t first_key = 0;  // 0, or 1 where sequences have no key 0: whose score may be anything
  FATHOM_PLANTED_FAULT
};

// One launch. A row that sees at most k keys gets all of them, and its scores are not read.
void select_top_keys(const TopKeysArguments& arguments, GpuStream stream);

// The same for rows that see at most k keys: reads no scores.
void select_all_keys(const TopKeysArguments& arguments, GpuStream stream);

}  // namespace fathom::cuda
