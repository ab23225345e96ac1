#include "ops/embedding/embedding_cpu.h"

#include <algorithm>

namespace fathom::cpu {
namespace {

// Below this many values a parallel region (0.5 to 1 us) costs more than it saves.
constexpr int64_t kParallelValues = 32 * 1024;

template <typename T>
void copy_rows(ThreadPool& pool, std::span<const int32_t> ids, ConstTensorView table,
               TensorView out) {
  const int64_t n = table.size(1);
  const int64_t grain = std::max<int64_t>(1, kParallelValues / std::max<int64_t>(1, n));
  pool.parallel_for(static_cast<int64_t>(ids.size()), grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* in = table.row<T>(ids[static_cast<size_t>(row)]);
      float* result = out.row<float>(row);
      for (int64_t i = 0; i < n; ++i) result[i] = to_float(in[i]);
    }
  });
}

}  // namespace

void embedding(ThreadPool& pool, std::span<const int32_t> ids, ConstTensorView table,
               TensorView out) {
  if (table.dtype() == DType::kF32) {
    copy_rows<float>(pool, ids, table, out);
  } else {
    copy_rows<bf16>(pool, ids, table, out);
  }
}

}  // namespace fathom::cpu
