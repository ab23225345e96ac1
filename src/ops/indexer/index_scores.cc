#include "ops/indexer/index_scores.h"

#include "ops/indexer/indexer_cpu.h"

namespace fathom {
namespace {

constexpr int64_t kMaxHeads = 1024;

// Every page that a listed row reads must exist: a wrong page id would read other sequences'
// memory.
void check_rows(const PagedBatch& batch, std::span<const SparseRow> rows,
                const IndexKeyPages& pages, int64_t batch_rows, int64_t columns) {
  const int64_t num_sequences =
      batch.max_pages > 0 ? static_cast<int64_t>(batch.block_tables.size()) / batch.max_pages : 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    const SparseRow& row = rows[i];
    FATHOM_CHECK(row.row >= 0 && row.row < batch_rows && row.sequence >= 0 &&
                     row.sequence < num_sequences && row.length > batch.first_key &&
                     row.length <= int64_t{batch.max_pages} * kPageSize && row.length <= columns,
                 "row {} of {}, sequence {} of {}, {} keys from {} on in {} pages and {} columns",
                 row.row, batch_rows, row.sequence, num_sequences, row.length, batch.first_key,
                 batch.max_pages, columns);
    const bool longest = i + 1 == rows.size() || rows[i + 1].sequence != row.sequence;
    FATHOM_CHECK(longest || rows[i + 1].length >= row.length,
                 "sequence {}: a row of {} keys before one of {}", row.sequence, row.length,
                 rows[i + 1].length);
    if (!longest) continue;
    for (int64_t page = 0; page * kPageSize < row.length; ++page) {
      const int32_t id = batch.pages(row.sequence)[static_cast<size_t>(page)];
      FATHOM_CHECK(id >= 0 && id < pages.num_pages, "page {} of {}", id, pages.num_pages);
    }
  }
}

}  // namespace

DType index_query_type(IndexKeyFormat format) {
  switch (format) {
    case IndexKeyFormat::kE4M3:
      return DType::kF8E4M3;
    case IndexKeyFormat::kBF16:
      return DType::kBF16;
    case IndexKeyFormat::kF32:
      break;
  }
  return DType::kF32;
}

int64_t index_scores_workspace_bytes(int64_t rows, int64_t num_heads, int64_t dim,
                                     int num_threads) {
  return cpu::index_scores_workspace_bytes(rows, num_heads, dim, num_threads);
}

void index_scores(const Stream& stream, ConstTensorView values, ConstTensorView weights,
                  const PagedBatch& batch, std::span<const SparseRow> rows,
                  const IndexKeyPages& pages, TensorView scores, std::span<std::byte> workspace) {
  if (rows.empty()) return;
  const IndexKeyLayout& layout = pages.layout;
  FATHOM_CHECK(values.rank() == 3 && values.size(1) >= 1 && values.size(1) <= kMaxHeads &&
                   values.size(2) == layout.dim && layout.dim % 2 == 0 &&
                   values.dtype() == index_query_type(layout.format),
               "values {} of {}, keys of {} in {}", values.shape_string(), name_of(values.dtype()),
               layout.dim, name_of(layout.format));
  FATHOM_CHECK(weights.rank() == 2 && weights.size(0) == values.size(0) &&
                   weights.size(1) == values.size(1) && weights.dtype() == DType::kF32,
               "values {}, weights {}", values.shape_string(), weights.shape_string());
  FATHOM_CHECK(scores.rank() == 2 && scores.dtype() == DType::kF32 &&
                   scores.size(0) == static_cast<int64_t>(rows.size()),
               "scores {} for {} rows", scores.shape_string(), rows.size());
  check_rows(batch, rows, pages, values.size(0), scores.size(1));
  switch (stream.device()) {
    case DeviceKind::kCpu:
      cpu::index_scores(stream.pool(), cpu_isa(), values, weights, batch, rows, pages, scores,
                        workspace);
  }
}

}  // namespace fathom
