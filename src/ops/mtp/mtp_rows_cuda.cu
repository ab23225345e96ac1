// What: out[i] = (norm(table[id of row i]), norm(state before row i)); and states to their pages.
//
// Inputs/outputs: mtp_rows_cuda.h.
//
// Layout: a CTA for each half of a row, a thread for each eight values (two eights each from n =
// 8,200 on). Shared memory: one word a warp. A kept state is copied by one CTA.
//
// Algorithm: as rms_norm (ops/rms_norm/add_rms_norm_cuda.cu), with the row looked up.
//
// Determinism: sums in an order that depends on n alone.
//
// Limits: n a multiple of 8, at most 16,384.
//
// Source: DeepSeek-V3 (2024), section 2.2.
//
// Measured: docs/speculation.md.
#include <algorithm>

#include "base/check.h"
#include "base/math.h"
#include "device/cuda/launch.h"
#include "device/cuda/rows.cuh"
#include "ops/mtp/mtp_rows_cuda.h"

namespace fathom::cuda {
namespace {

constexpr int kWideThreads = 1024;

__device__ __nv_bfloat16* state_at(const KeptStates& kept, int64_t number, int64_t n) {
  return reinterpret_cast<__nv_bfloat16*>(kept.data + number / kept.a_page * kept.page_bytes) +
         number % kept.a_page * n;
}

// Null: zeros.
__device__ const __nv_bfloat16* embedding_row(const MtpInputArguments& arguments, int64_t row) {
  int64_t id = arguments.ids[row];
  if (FATHOM_PLANTED(arguments, kStaleToken) && row % 3 == 1 && id < -1) ++id;
  if (id < 0) id = arguments.sampled[-1 - id];
  for (int shard = 0; shard < arguments.num_shards && id >= 0; ++shard) {
    const EmbeddingShard& rows = arguments.shards[shard];
    if (id < rows.count) return static_cast<const __nv_bfloat16*>(rows.table) + id * arguments.n;
    id -= rows.count;
  }
  return nullptr;
}

__device__ const __nv_bfloat16* state_row(const MtpInputArguments& arguments, int64_t row) {
  const int64_t previous = arguments.previous[row];
  if (previous == kNoState) return nullptr;
  if (previous < 0) return state_at(arguments.kept, -1 - previous, arguments.n);
  return static_cast<const __nv_bfloat16*>(arguments.states) + previous * arguments.n;
}

template <int kThreads, int kEights>
__global__ void __launch_bounds__(kThreads)
    mtp_input_kernel(const __grid_constant__ MtpInputArguments arguments) {
  constexpr int kWarps = kThreads / kWarp;
  __shared__ alignas(16) float parts[kWarps];
  let_next_launch_begin();
  const bool is_state = blockIdx.y == 1;
  const int eights = static_cast<int>(arguments.n / 8);
  const float* const weights = is_state ? arguments.state_norm : arguments.embedding_norm;
  Eight weight[kEights];
#pragma unroll
  for (int e = 0; e < kEights; ++e) {
    const int eight = threadIdx.x + e * blockDim.x;
    if (eight < eights) weight[e] = load_eight_weights(weights + eight * 8);
  }
  wait_for_earlier_launches();
  const int64_t row = blockIdx.x;
  const __nv_bfloat16* const from =
      is_state ? state_row(arguments, row) : embedding_row(arguments, row);
  Eight x[kEights] = {};
  float sum = 0;
#pragma unroll
  for (int e = 0; e < kEights; ++e) {
    const int eight = threadIdx.x + e * blockDim.x;
    if (eight >= eights || from == nullptr) continue;
    x[e] = load_eight(from + eight * 8);
    sum += sum_of_squares(x[e]);
  }
  sum = warp_sum(sum);
  if (threadIdx.x < kWarps && threadIdx.x >= blockDim.x / kWarp) parts[threadIdx.x] = 0;
  if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = sum;
  __syncthreads();
  const float scale = inverse_rms(sum_of_block<kThreads>(parts), eights * 8, arguments.eps);
  __nv_bfloat16* const to =
      static_cast<__nv_bfloat16*>(arguments.out) + (2 * row + (is_state ? 1 : 0)) * arguments.n;
#pragma unroll
  for (int e = 0; e < kEights; ++e) {
    const int eight = threadIdx.x + e * blockDim.x;
    if (eight < eights) store_eight(normed(x[e], weight[e], scale), to + eight * 8);
  }
}

__global__ void __launch_bounds__(kRowThreads)
    keep_states_kernel(const __grid_constant__ KeepStatesArguments arguments) {
  let_next_launch_begin();
  wait_for_earlier_launches();
  const int64_t row = blockIdx.x;
  int64_t slot = arguments.slots[row];
  if (slot < 0) return;
  if (FATHOM_PLANTED(arguments, kWrongRow) && row == 5) slot ^= 1;
  const auto* const from = reinterpret_cast<const uint4*>(
      static_cast<const __nv_bfloat16*>(arguments.states) + row * arguments.n);
  auto* const to = reinterpret_cast<uint4*>(state_at(arguments.kept, slot, arguments.n));
  for (int64_t i = threadIdx.x; i < arguments.n / 8; i += kRowThreads) to[i] = from[i];
}

void check_rows(int64_t n, const KeptStates& kept) {
  FATHOM_CHECK(n > 0 && n % 8 == 0 && n <= 16 * kWideThreads, "rows of {}", n);
  FATHOM_CHECK(kept.a_page >= 1 && kept.page_bytes % 16 == 0, "{} states in pages of {} bytes",
               kept.a_page, kept.page_bytes);
}

}  // namespace

void mtp_input(const MtpInputArguments& arguments, GpuStream stream) {
  check_rows(arguments.n, arguments.kept);
  FATHOM_CHECK(arguments.num_shards >= 1 && arguments.num_shards <= kMostPeers,
               "a table in {} shards", arguments.num_shards);
  if (arguments.rows == 0) return;
  const int64_t eights = arguments.n / 8;
  const int64_t threads = std::min<int64_t>(kWideThreads, round_up(eights, kWarp));
  const LaunchShape shape = {.blocks = dim3(static_cast<unsigned>(arguments.rows), 2),
                             .threads = static_cast<unsigned>(threads)};
  if (eights <= kRowThreads) {
    launch(mtp_input_kernel<kRowThreads, 1>, shape, stream, arguments);
  } else if (eights <= kWideThreads) {
    launch(mtp_input_kernel<kWideThreads, 1>, shape, stream, arguments);
  } else {
    launch(mtp_input_kernel<kWideThreads, 2>, shape, stream, arguments);
  }
}

void keep_states(const KeepStatesArguments& arguments, GpuStream stream) {
  check_rows(arguments.n, arguments.kept);
  if (arguments.rows == 0) return;
  launch(keep_states_kernel,
         {.blocks = static_cast<unsigned>(arguments.rows), .threads = kRowThreads}, stream,
         arguments);
}

}  // namespace fathom::cuda
