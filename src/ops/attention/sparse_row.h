// A row of a step as the sparse operations see it. Plain data.
#pragma once

#include <cstdint>

namespace fathom {

// Row `row` of the batch belongs to `sequence` and sees the positions [first_key, length) of it,
// first_key being the batch's (PagedBatch). Its own token is length - 1.
struct SparseRow {
  int32_t row = 0;
  int32_t sequence = 0;
  int32_t length = 0;

  friend bool operator==(const SparseRow&, const SparseRow&) = default;
};

// How many of the k columns of a row's list hold a position: min(k, length - first_key).
inline int32_t count_keys(const SparseRow& row, int32_t first_key, int64_t k) {
  const int64_t visible = int64_t{row.length} - first_key;
  return static_cast<int32_t>(visible < k ? visible : k);
}

}  // namespace fathom
