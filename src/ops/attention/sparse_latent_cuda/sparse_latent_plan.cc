#include "ops/attention/sparse_latent_cuda/sparse_latent_plan.h"

#include <algorithm>

#include "base/math.h"

namespace fathom::cuda {

int32_t sparse_latent_split_keys(int64_t rows, int32_t heads, int32_t top_k,
                                 int num_multiprocessors) {
  const int64_t row_ctas = rows * ceil_div(heads, kSparseTileHeads);
  // As many splits as find an SM each. What they write and read again bounds them: two tiles at
  // least for one row, four for more (docs/kernels/sparse_latent_attention.md).
  const int64_t splits = std::max<int64_t>(num_multiprocessors / std::max<int64_t>(row_ctas, 1), 1);
  const int64_t tiles =
      std::max<int64_t>(ceil_div(ceil_div(top_k, kSparseTileKeys), splits), row_ctas <= 2 ? 2 : 4);
  return static_cast<int32_t>(std::min<int64_t>(tiles * kSparseTileKeys, top_k));
}

int64_t sparse_latent_scratch_words(int64_t rows, int32_t heads, int32_t top_k,
                                    int32_t split_keys) {
  if (split_keys >= top_k) return 0;
  const int64_t slots = rows * ceil_div(heads, kSparseTileHeads) * ceil_div(top_k, split_keys);
  return slots * (kSparseSumWords + kSparseTileHeads);
}

}  // namespace fathom::cuda
