// What: residual += delta; out = weight * residual / sqrt(mean(residual^2) + eps), as bf16, as e4m3
// with scales 1x128, or both.
//
// Inputs/outputs: add_rms_norm_cuda.h.
//
// Layout: one CTA a row, a thread for each eight values (two eights each from n = 8,200 on), which
// stay in its registers: batch 1 is bound by the latency of one thread's dependent steps. Shared
// memory: one word a warp.
//
// Algorithm: weights are loaded before the PDL wait; then a thread loads all of its row's values at
// once; one sum over the CTA. Sixteen lanes hold a block of 128 columns.
//
// Determinism: sums in an order that depends on n alone: a row's bits do not depend on the batch.
//
// Limits: n a multiple of 8, at most 16,384; in e4m3 of 128.
//
// Source: Zhang and Sennrich (2019).
//
// Measured: docs/kernels/fused.md.
#include <algorithm>

#include "base/check.h"
#include "base/math.h"
#include "device/cuda/launch.h"
#include "device/cuda/rows.cuh"
#include "ops/rms_norm/add_rms_norm_cuda.h"
#include "ops/scaled_linear/quantize_block_cuda.cuh"

namespace fathom::cuda {
namespace {

struct Nothing {};

template <typename X, typename Delta>
struct Arguments {
  X* x;
  X* sums;  // x + delta; may be x
  const Delta* delta;
  const int32_t* row_ids;
  const float* weight;
  __nv_bfloat16* out;  // may be null
  QuantizedRows quantized = {};
  int64_t x_stride, delta_stride, out_stride;
  int32_t eights;  // n / 8
  float eps;
};

constexpr int kWideThreads = 1024;

template <int kThreads, int kEights, typename X, typename Delta>
__global__ void __launch_bounds__(kThreads)
    rms_norm_kernel(const __grid_constant__ Arguments<X, Delta> arguments) {
  constexpr bool kAdds = !std::is_same_v<Delta, Nothing>;
  constexpr int kWarps = kThreads / kWarp;
  __shared__ alignas(16) float parts[kWarps];
  let_next_launch_begin();
  Eight weight[kEights];
#pragma unroll
  for (int e = 0; e < kEights; ++e) {
    const int eight = threadIdx.x + e * blockDim.x;
    if (eight < arguments.eights) weight[e] = load_eight_weights(arguments.weight + eight * 8);
  }
  wait_for_earlier_launches();
  int64_t row = blockIdx.x;
  if (arguments.row_ids != nullptr) row = arguments.row_ids[row];
  if (row < 0) return;

  X* const x_row = arguments.x + row * arguments.x_stride;
  Eight x[kEights];
  float sum = 0;
#pragma unroll
  for (int e = 0; e < kEights; ++e) {
    const int eight = threadIdx.x + e * blockDim.x;
    if (eight >= arguments.eights) continue;
    x[e] = load_eight(x_row + eight * 8);
    if constexpr (kAdds) {
      const Eight delta = load_eight(arguments.delta + row * arguments.delta_stride + eight * 8);
#pragma unroll
      for (int i = 0; i < 8; ++i) x[e].v[i] += delta.v[i];
      store_eight(x[e], arguments.sums + blockIdx.x * arguments.x_stride + eight * 8);
    }
    sum += sum_of_squares(x[e]);
  }
  sum = warp_sum(sum);
  if (threadIdx.x < kWarps && threadIdx.x >= blockDim.x / kWarp) parts[threadIdx.x] = 0;
  if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = sum;
  __syncthreads();
  const float scale =
      inverse_rms(sum_of_block<kThreads>(parts), arguments.eights * 8, arguments.eps);
#pragma unroll
  for (int e = 0; e < kEights; ++e) {
    const int eight = threadIdx.x + e * blockDim.x;
    if (eight >= arguments.eights) continue;
    const uint4 out = narrow(normed(x[e], weight[e], scale));
    if (arguments.out != nullptr) {
      __nv_bfloat16* const out_row = arguments.out + blockIdx.x * arguments.out_stride;
      *reinterpret_cast<uint4*>(out_row + eight * 8) = out;
    }
    if (arguments.quantized.values != nullptr) {
      store_quantized(out, arguments.quantized, blockIdx.x, eight * 8);
    }
  }
}

template <typename X, typename Delta>
void launch_rows(int64_t rows, const Arguments<X, Delta>& arguments, GpuStream stream) {
  if (rows == 0) return;
  const int64_t threads = std::min<int64_t>(kWideThreads, round_up(arguments.eights, kWarp));
  const LaunchShape shape = {.blocks = static_cast<unsigned>(rows),
                             .threads = static_cast<unsigned>(threads)};
  if (arguments.eights <= kRowThreads) {
    launch(rms_norm_kernel<kRowThreads, 1, X, Delta>, shape, stream, arguments);
  } else if (arguments.eights <= kWideThreads) {
    launch(rms_norm_kernel<kWideThreads, 1, X, Delta>, shape, stream, arguments);
  } else {
    launch(rms_norm_kernel<kWideThreads, 2, X, Delta>, shape, stream, arguments);
  }
}

void check_rows(int64_t n, int64_t rows, const QuantizedRows& quantized) {
  FATHOM_CHECK(n > 0 && n % 8 == 0 && n <= 16 * kWideThreads, "rows of {}", n);
  if (quantized.values == nullptr) return;
  FATHOM_CHECK(n % kScaleBlock == 0, "rows of {} in e4m3", n);
  FATHOM_CHECK(quantized.values_row_stride >= n && quantized.values_row_stride % 16 == 0 &&
                   quantized.scales_block_stride >= rows && quantized.scales_block_stride % 4 == 0,
               "strides {} and {} of {} rows of {} in e4m3", quantized.values_row_stride,
               quantized.scales_block_stride, rows, n);
}

template <typename Delta>
void add_rms_norm_as(const AddRmsNormArguments& arguments, GpuStream stream) {
  launch_rows<float, Delta>(
      arguments.rows,
      {.x = arguments.residual,
       .sums = arguments.row_ids != nullptr ? arguments.gathered : arguments.residual,
       .delta = static_cast<const Delta*>(arguments.delta),
       .row_ids = arguments.row_ids,
       .weight = arguments.weight,
       .out = static_cast<__nv_bfloat16*>(arguments.out),
       .quantized = arguments.quantized,
       .x_stride = arguments.n,
       .delta_stride = arguments.delta_stride,
       .out_stride = arguments.n,
       .eights = static_cast<int32_t>(arguments.n / 8),
       .eps = arguments.eps},
      stream);
}

}  // namespace

void add_rms_norm(const AddRmsNormArguments& arguments, GpuStream stream) {
  check_rows(arguments.n, arguments.rows, arguments.quantized);
  FATHOM_CHECK(
      arguments.row_ids == nullptr || (arguments.delta != nullptr && arguments.gathered != nullptr),
      "rows by index want a delta and a place for the sums");
  if (arguments.delta == nullptr) return add_rms_norm_as<Nothing>(arguments, stream);
  FATHOM_CHECK(arguments.delta_stride >= arguments.n && arguments.delta_stride % 8 == 0,
               "delta's rows {} apart, {} wide", arguments.delta_stride, arguments.n);
  if (arguments.delta_type == DType::kF32) return add_rms_norm_as<float>(arguments, stream);
  FATHOM_CHECK(arguments.delta_type == DType::kBF16, "delta in {}", name_of(arguments.delta_type));
  add_rms_norm_as<__nv_bfloat16>(arguments, stream);
}

void rms_norm(const RmsNormArguments& arguments, GpuStream stream) {
  check_rows(arguments.n, arguments.rows, arguments.quantized);
  FATHOM_CHECK(arguments.x_stride % 8 == 0 && arguments.out_stride % 8 == 0, "strides {} and {}",
               arguments.x_stride, arguments.out_stride);
  launch_rows<const __nv_bfloat16, Nothing>(arguments.rows,
                                            {.x = static_cast<const __nv_bfloat16*>(arguments.x),
                                             .sums = nullptr,
                                             .delta = nullptr,
                                             .row_ids = nullptr,
                                             .weight = arguments.weight,
                                             .out = static_cast<__nv_bfloat16*>(arguments.out),
                                             .quantized = arguments.quantized,
                                             .x_stride = arguments.x_stride,
                                             .delta_stride = 0,
                                             .out_stride = arguments.out_stride,
                                             .eights = static_cast<int32_t>(arguments.n / 8),
                                             .eps = arguments.eps},
                                            stream);
}

}  // namespace fathom::cuda
