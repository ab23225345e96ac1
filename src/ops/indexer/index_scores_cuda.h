// Index scores on a Hopper GPU: index_scores() of ops/indexer/index_scores.h over e4m3 keys.
//
// Products of e4m3 are exact; their sums over 128 values are formed by tensor cores, 32 values at a
// time, and sums over heads are fp32 in one fixed order. A NaN in a key or a query gives NaN
// scores.
#pragma once

#include <cstdint>

#include "device/cuda/gpu_stream.h"
#include "device/cuda/planted_fault.h"
#include "ops/indexer/index_pages_cuda.h"

namespace fathom::cuda {

// All pointers are device memory, values and weights multiples of 16. Row r sees the first
// lengths[r] keys of its sequence, whose pages are block_tables[table_starts[r]] and the following.
// Rows of one sequence that are next to one another have ascending lengths, and no two sequences
// the same start.
struct IndexScoresArguments {
  const void* values = nullptr;    // [rows, heads, 128] e4m3
  const float* weights = nullptr;  // [rows, heads]
  const int32_t* lengths = nullptr;
  const int32_t* table_starts = nullptr;
  const int32_t* block_tables = nullptr;
  IndexPages pages;
  float* scores = nullptr;  // [rows, columns]: written where the row sees a key
  int64_t columns = 0;      // at least any length; a multiple of 4
  int32_t rows = 0;
  int32_t heads = 0;  // 16, 32 or 64
  // Rows that see at most so many keys have no scores.
  int32_t dense_keys = 0;
  FATHOM_PLANTED_FAULT
};

// One launch of at most `sms` CTAs. Its work follows the rows' lengths, not `columns`, so that a
// captured launch costs what its rows' lengths ask for. Batch-invariant: a row's bits depend on its
// own values, weights and keys alone.
void index_scores(const IndexScoresArguments& arguments, int sms, GpuStream stream);

}  // namespace fathom::cuda
