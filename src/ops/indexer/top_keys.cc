#include "ops/indexer/top_keys.h"

#include <algorithm>
#include <numeric>

#include "ops/indexer/indexer_cpu.h"

namespace fathom {
namespace {

void check_rows(std::span<const SparseRow> rows, int32_t first_key, ConstTensorView keys) {
  FATHOM_CHECK(keys.rank() == 2 && keys.dtype() == DType::kI32 && keys.size(1) >= 1 &&
                   keys.size(0) == static_cast<int64_t>(rows.size()),
               "keys {} of {} for {} rows", keys.shape_string(), name_of(keys.dtype()),
               rows.size());
  for (const SparseRow& row : rows) {
    FATHOM_CHECK(first_key >= 0 && row.length > first_key, "{} keys from {} on", row.length,
                 first_key);
  }
}

}  // namespace

int64_t top_keys_workspace_bytes(int64_t max_length, int num_threads) {
  return cpu::top_keys_workspace_bytes(max_length, num_threads);
}

void select_top_keys(const Stream& stream, ConstTensorView scores, std::span<const SparseRow> rows,
                     int32_t first_key, TensorView keys, std::span<std::byte> workspace) {
  if (rows.empty()) return;
  check_rows(rows, first_key, keys);
  for (const SparseRow& row : rows) {
    if (row.length - first_key <= keys.size(1)) continue;
    FATHOM_CHECK(scores.rank() == 2 && scores.dtype() == DType::kF32 &&
                     scores.size(0) == keys.size(0) && scores.size(1) >= row.length,
                 "scores {} for {} rows, one of {} keys", scores.shape_string(), rows.size(),
                 row.length);
  }
  switch (stream.device()) {
    case DeviceKind::kCpu:
      cpu::select_top_keys(stream.pool(), cpu_isa(), scores, rows, first_key, keys, workspace);
  }
}

void select_all_keys(std::span<const SparseRow> rows, int32_t first_key, TensorView keys) {
  if (rows.empty()) return;
  check_rows(rows, first_key, keys);
  const int64_t k = keys.size(1);
  for (size_t i = 0; i < rows.size(); ++i) {
    const int64_t count = int64_t{rows[i].length} - first_key;
    FATHOM_CHECK(count <= k, "all of {} keys in a list of {}", count, k);
    int32_t* list = keys.row<int32_t>(static_cast<int64_t>(i));
    std::iota(list, list + count, first_key);
    std::fill(list + count, list + k, -1);
  }
}

}  // namespace fathom
