// What: out[i] = table[id of row i], upconverted to fp32.
//
// Inputs/outputs: embedding_cuda.h.
//
// Layout: a CTA for each 2,048 values of a row, eight a thread.
//
// Determinism: copies only.
//
// Measured: docs/kernels/fused.md.
#include "base/check.h"
#include "base/math.h"
#include "device/cuda/launch.h"
#include "device/cuda/rows.cuh"
#include "ops/embedding/embedding_cuda.h"

namespace fathom::cuda {
namespace {

constexpr int kThreads = 256;

template <typename T>
__global__ void __launch_bounds__(kThreads)
    embedding_kernel(const __grid_constant__ EmbeddingArguments arguments) {
  let_next_launch_begin();
  wait_for_earlier_launches();
  const int64_t row = blockIdx.x;
  const int64_t column = (static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x) * 8;
  if (column >= arguments.n) return;
  int64_t id = arguments.ids[row];
  if (FATHOM_PLANTED(arguments, kStaleToken) && row == 2 && id < -1) ++id;
  if (id < 0) id = arguments.sampled[-1 - id];
  Eight x = {};
  for (int shard = 0; shard < arguments.num_shards && id >= 0; ++shard) {
    const EmbeddingShard& rows = arguments.shards[shard];
    if (id < rows.count) {
      x = load_eight(static_cast<const T*>(rows.table) + id * arguments.n + column);
    }
    id -= rows.count;
  }
  store_eight(x, arguments.out + row * arguments.n + column);
}

}  // namespace

void embedding(const EmbeddingArguments& arguments, GpuStream stream) {
  FATHOM_CHECK(arguments.n > 0 && arguments.n % 8 == 0, "rows of {}", arguments.n);
  FATHOM_CHECK(arguments.num_shards >= 1 && arguments.num_shards <= kMostPeers,
               "a table in {} shards", arguments.num_shards);
  FATHOM_CHECK(arguments.table_type == DType::kBF16 || arguments.table_type == DType::kF32,
               "a table of {}", name_of(arguments.table_type));
  if (arguments.rows == 0) return;
  launch(arguments.table_type == DType::kF32 ? embedding_kernel<float>
                                             : embedding_kernel<__nv_bfloat16>,
         {.blocks = dim3(static_cast<unsigned>(arguments.rows),
                         static_cast<unsigned>(ceil_div(arguments.n, kThreads * 8))),
          .threads = kThreads},
         stream, arguments);
}

}  // namespace fathom::cuda
