#include "ops/attention/sparse_latent_cuda/sparse_latent_attention_cuda.h"

#include "base/check.h"
#include "ops/attention/sparse_latent_cuda/sparse_latent_kernels_cuda.h"

namespace fathom::cuda {

void sparse_latent_attention(int num_multiprocessors, const SparseLatentArguments& arguments,
                             GpuStream stream) {
  if (arguments.rows == 0) return;
  FATHOM_CHECK(arguments.heads >= 1 && arguments.top_k >= 1 && arguments.max_pages >= 1,
               "{} heads, lists of {}, {} pages", arguments.heads, arguments.top_k,
               arguments.max_pages);
  FATHOM_CHECK(arguments.rows <= INT32_MAX / (int64_t{arguments.heads} + 64), "{} rows of {} heads",
               arguments.rows, arguments.heads);
  FATHOM_CHECK(arguments.page_stride > 0 && arguments.page_stride % 16 == 0, "page stride {}",
               arguments.page_stride);
  const bool one_split = arguments.split_keys >= arguments.top_k;
  FATHOM_CHECK(
      one_split || (arguments.split_keys > 0 && arguments.split_keys % kSparseTileKeys == 0),
      "splits of {} keys", arguments.split_keys);
  FATHOM_CHECK(one_split || arguments.scratch != nullptr, "no scratch for splits of {} keys",
               arguments.split_keys);
  if (arguments.format == CacheFormat::kBF16) {
    sparse_latent_bf16(num_multiprocessors, arguments, stream);
  } else {
    sparse_latent_8_bit(arguments, stream);
  }
}

}  // namespace fathom::cuda
