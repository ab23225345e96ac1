// What: a token's index key from wk's output, into its cache row; and its index queries and their
// weights from the outputs of wq_b and weights_proj.
//
// Inputs/outputs: index_keys_cuda.h.
//
// Layout: a warp a row of 128 values, four a lane; rows of queries are (token, head).
//
// Algorithm: LayerNorm (keys alone), rotation, Hadamard transform by two stages of butterflies
// inside a lane and five across lanes, the largest magnitude, e4m3.
//
// Determinism: a row's bits do not depend on the other rows.
//
// Limits: 128 values, 64 of them rotated.
//
// Source: DeepSeek-V3.2-Exp (2025); ops/indexer/index_keys.h.
//
// Measured: docs/kernels/sparse_attention.md.
#include <cmath>

#include "base/check.h"
#include "base/math.h"
#include "device/cuda/launch.h"
#include "ops/indexer/index_keys_cuda.h"
#include "ops/indexer/index_row_cuda.cuh"

namespace fathom::cuda {
namespace {

constexpr int kWarpsABlock = 4;

// hadamard()'s factor, rounded as on the CPU.
float hadamard_factor() { return 1.0f / std::sqrt(static_cast<float>(kIndexDim)); }

template <IndexPairs kPairs>
__global__ void __launch_bounds__(kWarpsABlock* kWarp)
    keys_kernel(const __grid_constant__ IndexKeysArguments arguments, float factor) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarpsABlock + threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  let_next_launch_begin();
  const uint4 weight_bits = load_weights_16(arguments.norm_weight + 4 * lane);
  const uint4 bias_bits = load_weights_16(arguments.norm_bias + 4 * lane);
  wait_for_earlier_launches();
  if (row >= arguments.rows) return;
  const int64_t slot = arguments.slots[row];
  const int64_t position = arguments.positions[row];
  if (slot < 0) return;
  IndexRow x = load_index_row(
      static_cast<const __nv_bfloat16*>(arguments.k) + row * arguments.k_stride, lane);
  const auto widened = [](const uint4& bits) {
    return make_float4(__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z),
                       __uint_as_float(bits.w));
  };
  layer_norm(x, widened(weight_bits), widened(bias_bits), arguments.eps, lane);
  rotate<kPairs>(x, arguments.cos_sin + position * kIndexRope, lane);
  hadamard(x, factor, lane);
  float scale;
  const uint32_t codes = quantize_index_row(x, &scale);
  const int64_t at = FATHOM_PLANTED(arguments, kWrongIndexRow) && row == 5 ? slot ^ 1 : slot;
  std::byte* const page = arguments.pages.data + at / kPageSize * arguments.pages.stride;
  const int64_t token = at % kPageSize;
  reinterpret_cast<uint32_t*>(page + token * kIndexDim)[lane] = codes;
  if (lane == 0) reinterpret_cast<float*>(page + kIndexValueBytes)[token] = scale;
}

template <IndexPairs kPairs>
__global__ void __launch_bounds__(kWarpsABlock* kWarp)
    queries_kernel(const __grid_constant__ IndexQueriesArguments arguments, float factor,
                   float constant) {
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kWarpsABlock + threadIdx.x / kWarp;
  const int64_t row = item / arguments.heads;
  const int lane = threadIdx.x % kWarp;
  let_next_launch_begin();
  wait_for_earlier_launches();
  if (row >= arguments.rows) return;
  const int64_t position = arguments.positions[row];
  if (position < arguments.dense_keys) return;
  IndexRow x =
      load_index_row(static_cast<const __nv_bfloat16*>(arguments.q) + item * kIndexDim, lane);
  rotate<kPairs>(x, arguments.cos_sin + position * kIndexRope, lane);
  hadamard(x, factor, lane);
  float scale;
  const uint32_t codes = quantize_index_row(x, &scale);
  reinterpret_cast<uint32_t*>(arguments.values)[item * (kIndexDim / 4) + lane] = codes;
  if (lane == 0) {
    arguments.weights[item] = __fmul_rn(__fmul_rn(arguments.head_weights[item], constant), scale);
  }
}

unsigned blocks_of(int64_t warps) { return static_cast<unsigned>(ceil_div(warps, kWarpsABlock)); }

}  // namespace

void write_index_keys(const IndexKeysArguments& arguments, GpuStream stream) {
  FATHOM_CHECK(arguments.k_stride % 4 == 0 && arguments.k_stride >= kIndexDim &&
                   arguments.pages.stride % 16 == 0,
               "index keys {} apart, pages {} bytes apart", arguments.k_stride,
               arguments.pages.stride);
  if (arguments.rows == 0) return;
  auto* const kernel =
      arguments.interleaved ? keys_kernel<IndexPairs::kAdjacent> : keys_kernel<IndexPairs::kHalves>;
  launch(kernel, {.blocks = blocks_of(arguments.rows), .threads = kWarpsABlock * kWarp}, stream,
         arguments, hadamard_factor());
}

void make_index_queries(const IndexQueriesArguments& arguments, GpuStream stream) {
  FATHOM_CHECK(arguments.heads > 0, "{} index heads", arguments.heads);
  if (arguments.rows == 0) return;
  const auto constant =
      static_cast<float>(1 / std::sqrt(static_cast<double>(arguments.heads * kIndexDim)));
  auto* const kernel = arguments.interleaved ? queries_kernel<IndexPairs::kAdjacent>
                                             : queries_kernel<IndexPairs::kHalves>;
  launch(kernel,
         {.blocks = blocks_of(arguments.rows * arguments.heads), .threads = kWarpsABlock * kWarp},
         stream, arguments, hadamard_factor(), constant);
}

}  // namespace fathom::cuda
