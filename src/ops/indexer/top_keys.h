// The exact choice of a row's keys: the k highest scores.
//
// Order of scores: by value, -0 = +0, denormals as they are, NaN below -inf (a damaged key is
// chosen only where fewer than k others are). With equal scores the lower position comes first.
// Positions come out ascending: attention sums in this order, so the order is part of a row's bits.
// Equal in every run, on every level of instructions and with any number of threads.
#pragma once

#include <span>

#include "device/stream.h"
#include "ops/attention/sparse_row.h"
#include "tensor/tensor_view.h"

namespace fathom {

// Bytes for rows of at most max_length keys.
int64_t top_keys_workspace_bytes(int64_t max_length, int num_threads);

// For rows[i], i < R: scores [R, columns] f32 (rows may be strided), read at the positions
// [first_key, rows[i].length) -> keys [R, k] i32: min(k, visible) positions ascending, then -1.
// A row that sees at most k keys gets all of them and its scores are not read: `scores` may be an
// empty view where that holds for all rows (select_all_keys() below says so by name).
// k >= 1, 0 <= first_key < rows[i].length <= columns. The number of keys of a row is count_keys().
void select_top_keys(const Stream& stream, ConstTensorView scores, std::span<const SparseRow> rows,
                     int32_t first_key, TensorView keys, std::span<std::byte> workspace);

// The identity lists of rows that see at most k keys (the dense path of decode): needs no scores.
void select_all_keys(std::span<const SparseRow> rows, int32_t first_key, TensorView keys);

}  // namespace fathom
