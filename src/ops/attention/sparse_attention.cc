#include "ops/attention/sparse_attention.h"

#include "ops/attention/attention_checks.h"
#include "ops/attention/cpu/attention_cpu.h"

namespace fathom {
namespace {

// Every position must be one that its row sees, in order, and its page must exist: a wrong one
// would read other sequences' memory.
void check_lists(const PagedBatch& batch, std::span<const SparseRow> rows, ConstTensorView keys,
                 const LatentPages& pages, int64_t batch_rows) {
  for (size_t i = 0; i < rows.size(); ++i) {
    const SparseRow& row = rows[i];
    FATHOM_CHECK(row.row >= 0 && row.row < batch_rows && row.sequence >= 0 &&
                     row.sequence * int64_t{batch.max_pages} + batch.max_pages <=
                         static_cast<int64_t>(batch.block_tables.size()) &&
                     row.length > batch.first_key &&
                     row.length <= int64_t{batch.max_pages} * kPageSize,
                 "row {} of {}, sequence {}, {} keys from {} on in {} pages", row.row, batch_rows,
                 row.sequence, row.length, batch.first_key, batch.max_pages);
    const int32_t* list = keys.row<int32_t>(static_cast<int64_t>(i));
    const std::span<const int32_t> page_ids = batch.pages(row.sequence);
    int32_t before = batch.first_key - 1;
    for (int32_t e = 0; e < count_keys(row, batch.first_key, keys.size(1)); ++e) {
      FATHOM_CHECK(list[e] > before && list[e] < row.length, "row {}: key {} after {} of {}",
                   row.row, list[e], before, row.length);
      before = list[e];
      const int32_t page = page_ids[static_cast<size_t>(before / kPageSize)];
      FATHOM_CHECK(page >= 0 && page < pages.num_pages, "page {} of {}", page, pages.num_pages);
    }
  }
}

}  // namespace

int64_t sparse_attention_workspace_bytes(int64_t rows, int64_t num_heads, int64_t latent_dim,
                                         int num_threads, int64_t rope_dim) {
  return cpu::sparse_attention_workspace_bytes(rows, num_heads, latent_dim, num_threads, rope_dim);
}

void sparse_attention(const Stream& stream, ConstTensorView q_latent, ConstTensorView q_rope,
                      const PagedBatch& batch, std::span<const SparseRow> rows,
                      ConstTensorView keys, const LatentPages& pages, float softmax_scale,
                      TensorView out, TensorView lse, std::span<std::byte> workspace) {
  check_absorbed_operands(q_latent, q_rope, out, pages.layout);
  FATHOM_CHECK(keys.rank() == 2 && keys.dtype() == DType::kI32 && keys.size(1) >= 1 &&
                   keys.size(0) == static_cast<int64_t>(rows.size()),
               "keys {} of {} for {} rows", keys.shape_string(), name_of(keys.dtype()),
               rows.size());
  FATHOM_CHECK(lse.empty() || (lse.rank() == 2 && lse.dtype() == DType::kF32 &&
                               lse.size(0) == out.size(0) && lse.size(1) == out.size(1)),
               "lse {}, out {}", lse.shape_string(), out.shape_string());
  check_lists(batch, rows, keys, pages, q_latent.size(0));
  switch (stream.device()) {
    case DeviceKind::kCpu:
      cpu::sparse_attention(stream.pool(), cpu_isa(), q_latent, q_rope, batch, rows, keys, pages,
                            softmax_scale, out, lse, workspace);
  }
}

}  // namespace fathom
