// Index scores: how much a row wants each key that it sees.
//
//   score(row, s) = scale(s) * sum over heads of weight(row, h) * max(0, q(row, h) . k(s))
//
// in fp32, over the paged index keys. Products of e4m3 and of bf16 are exact; their sums are fp32.
// Weights may be negative, and so may scores. A NaN in a key or a query gives NaN scores.
//
// Bytes: a row reads its keys once, 132 B each as e4m3; 2 * H * dim operations a key (16,384 with
// 64 heads of 128: bound by arithmetic on every CPU that we know, not by memory).
#pragma once

#include <span>

#include "cache/index_key_layout.h"
#include "device/stream.h"
#include "ops/attention/paged_batch.h"
#include "ops/attention/sparse_row.h"
#include "tensor/dtype.h"
#include "tensor/tensor_view.h"

namespace fathom {

// The type of the queries' values over keys of this format: e4m3, bf16 or f32, as the keys.
DType index_query_type(IndexKeyFormat format);

// Bytes for `rows` rows of H index heads at a time.
int64_t index_scores_workspace_bytes(int64_t rows, int64_t num_heads, int64_t dim, int num_threads);

// For rows[i], i < R (rows of one sequence next to one another, lengths ascending within it):
//   values [batch rows, H, dim] and weights [batch rows, H] as make_index_queries() leaves them;
//   values are of index_query_type()
//   -> scores [R, columns] f32 (rows may be strided): scores[i][s] for every position s in
//      [batch.first_key, rows[i].length). All other elements are left alone. columns >= the
//      greatest length.
// Reads rows of batch.block_tables, .max_pages and .first_key; the cache already holds the keys of
// this step. 1 <= H <= 1,024, dim even.
// Batch-invariant: a row's bits depend on its values, weights and keys only, not on the other rows
// or the number of threads.
void index_scores(const Stream& stream, ConstTensorView values, ConstTensorView weights,
                  const PagedBatch& batch, std::span<const SparseRow> rows,
                  const IndexKeyPages& pages, TensorView scores, std::span<std::byte> workspace);

}  // namespace fathom
