// What: for each token: rotates its heads' rotary parts; writes latent = weight * latent /
// rms(latent) and the rotated rotary key into the token's row of the latent cache.
//
// Inputs/outputs: query_key_cuda.h.
//
// Layout: independent warps. A token's first warp has the latent, 16 values a lane, and the rotary
// key in its lanes 0 to 7; each other warp has the rotary parts of four heads, eight values (four
// pairs) a lane. The 16 lanes that hold values of the same 128 compute their common scale, where
// the cache has scales.
//
// Algorithm: all loads of a lane are issued at once: position, slot and values, then cos and sin.
//
// Determinism: a row's bits do not depend on the batch.
//
// Limits: latent 512, rotary 64.
//
// Source: Su et al. (2021); DeepSeek-V2 (2024), section 2.1.
//
// Measured: docs/kernels/fused.md.
#include "base/check.h"
#include "base/math.h"
#include "device/cuda/launch.h"
#include "ops/rope/query_key_cuda.h"
#include "ops/rope/query_key_row_cuda.cuh"

namespace fathom::cuda {
namespace {

constexpr int kLatent = 512, kRope = 64, kColumns = kLatent + kRope;
constexpr int kHeadsAWarp = kWarp / kEightsAHead;
constexpr int kWarpsABlock = 4;

struct Arguments {
  __nv_bfloat16* q;
  __nv_bfloat16* q_rope;
  const __nv_bfloat16* kv_a;
  const float* norm_weight;
  const float* cos_sin;
  const int32_t* positions;
  const int64_t* slots;
  std::byte* pages;
  int64_t q_stride, kv_a_stride, rows;
  int32_t heads, nope, warps_a_row;
  float eps;
  FATHOM_PLANTED_FAULT
};

__device__ void rotate_query(const Arguments& arguments, int64_t row, int first_head, int lane) {
  const int head = first_head + lane / kEightsAHead, part = lane % kEightsAHead * 8;
  if (head >= arguments.heads) return;
  __nv_bfloat16* const q = arguments.q + row * arguments.q_stride +
                           head * (arguments.nope + kRope) + arguments.nope + part;
  const int64_t slot = arguments.slots[row];
  const int32_t position = arguments.positions[row];
  const Eight x = load_eight(q);
  if (slot < 0) return;
  Eight y =
      rotated(x, load_eight(arguments.cos_sin + static_cast<int64_t>(position) * kRope + part));
  if (FATHOM_PLANTED(arguments, kSwappedQueryHead) && row == 3 && head >= arguments.heads - 2) {
    // Both heads are in the same warp: all lanes have read before one writes.
    const int other = arguments.heads - 1 - head + arguments.heads - 2;
    y = rotated(load_eight(arguments.q + row * arguments.q_stride +
                           other * (arguments.nope + kRope) + arguments.nope + part),
                load_eight(arguments.cos_sin + static_cast<int64_t>(position) * kRope + part));
    __syncwarp(__activemask());
  }
  store_eight(y, q);
  if (arguments.q_rope != nullptr) {
    store_eight(y, arguments.q_rope + (row * arguments.heads + head) * kRope + part);
  }
}

// The slot that a planted fault writes to instead.
__device__ int64_t wrong(const Arguments& arguments, int64_t row, int64_t slot) {
  return FATHOM_PLANTED(arguments, kWrongRow) && row == 5 ? slot ^ 1 : slot;
}

template <typename Row>
__device__ void write_latent(const Arguments& arguments, int64_t row, int lane,
                             const Eight (&weight)[2]) {
  const __nv_bfloat16* const from = arguments.kv_a + row * arguments.kv_a_stride;
  const int64_t slot = arguments.slots[row];
  const int32_t position = arguments.positions[row];
  const Eight x[2] = {load_eight(from + lane * 8), load_eight(from + (lane + kWarp) * 8)};
  Eight key = {};
  if (lane < kEightsAHead) key = load_eight(from + kLatent + lane * 8);
  if (slot < 0) return;
  write_latent_row<Row>(x, key, weight, arguments.eps,
                        arguments.cos_sin + static_cast<int64_t>(position) * kRope,
                        arguments.pages + wrong(arguments, row, slot) * Row::kBytes, lane);
}

template <typename Row>
__global__ void __launch_bounds__(kWarpsABlock* kWarp)
    query_key_kernel(const __grid_constant__ Arguments arguments) {
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * kWarpsABlock + threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  const int64_t row = warp / arguments.warps_a_row;
  const int task = static_cast<int>(warp % arguments.warps_a_row);
  let_next_launch_begin();
  Eight weight[2] = {};
  if (task == 0) {
    weight[0] = load_eight_weights(arguments.norm_weight + lane * 8);
    weight[1] = load_eight_weights(arguments.norm_weight + (lane + kWarp) * 8);
  }
  if (!FATHOM_PLANTED(arguments, kSkippedLaunchWait)) wait_for_earlier_launches();
  if (row >= arguments.rows) return;
  if (task == 0) {
    write_latent<Row>(arguments, row, lane, weight);
  } else {
    rotate_query(arguments, row, (task - 1) * kHeadsAWarp, lane);
  }
}

}  // namespace

void query_key(const QueryKeyArguments& arguments, GpuStream stream) {
  FATHOM_CHECK(arguments.q_stride % 8 == 0 && arguments.kv_a_stride % 8 == 0 &&
                   arguments.nope % 8 == 0 &&
                   arguments.q_stride >= int64_t{arguments.heads} * (arguments.nope + kRope) &&
                   arguments.kv_a_stride >= kColumns,
               "q's rows {} apart, kv_a's {}, {} heads of {} + 64", arguments.q_stride,
               arguments.kv_a_stride, arguments.heads, arguments.nope);
  if (arguments.rows == 0) return;
  Arguments inner;
  inner.q = static_cast<__nv_bfloat16*>(arguments.q);
  inner.q_rope = static_cast<__nv_bfloat16*>(arguments.q_rope);
  inner.kv_a = static_cast<const __nv_bfloat16*>(arguments.kv_a);
  inner.norm_weight = arguments.norm_weight;
  inner.cos_sin = arguments.cos_sin;
  inner.positions = arguments.positions;
  inner.slots = arguments.slots;
  inner.pages = static_cast<std::byte*>(arguments.pages);
  inner.q_stride = arguments.q_stride;
  inner.kv_a_stride = arguments.kv_a_stride;
  inner.rows = arguments.rows;
  inner.heads = arguments.heads;
  inner.nope = arguments.nope;
  inner.warps_a_row = 1 + static_cast<int32_t>(ceil_div(arguments.heads, kHeadsAWarp));
  inner.eps = arguments.eps;
  const auto blocks =
      static_cast<unsigned>(ceil_div(arguments.rows * inner.warps_a_row, kWarpsABlock));
  with_latent_row(arguments.format, [&]<typename Row>(Row) {
    launch(query_key_kernel<Row>, {.blocks = blocks, .threads = kWarpsABlock * kWarp}, stream,
           inner);
  });
}

}  // namespace fathom::cuda
