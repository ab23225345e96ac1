// What: a row's columns by blocks of 128: the largest magnitude, and e4m3 of what it divides.
//
// Inputs/outputs: quantize_rows_cuda.h.
//
// Layout: sixteen lanes a block of 128, 16 bytes of x and 8 of the result each. The 16 such groups
// of a thread block take neighbouring rows of the same columns, as many as there are, so that their
// scales are neighbours in memory.
//
// Determinism: the bits of quantize_block().
//
// Limits: bound by memory: reads 2 bytes a value and writes 1.03.
//
// Measured: docs/kernels/scaled_linear.md.
#include <algorithm>
#include <bit>

#include "base/math.h"
#include "device/cuda/fp8.cuh"
#include "device/cuda/launch.h"
#include "device/cuda/rows.cuh"
#include "ops/scaled_linear/quantize_rows_cuda.h"

namespace fathom::cuda {
namespace {

constexpr int kThreads = 256, kLanes = 16, kGroups = kThreads / kLanes;

// rows_together: of a thread block, a power of two up to kGroups.
__global__ void __launch_bounds__(kThreads)
    quantize_rows_kernel(const __grid_constant__ QuantizeRowsArguments a, int rows_together,
                         int blocks_across) {
  wait_for_earlier_launches();
  let_next_launch_begin();
  const int lane = static_cast<int>(threadIdx.x) % kLanes,
            group = static_cast<int>(threadIdx.x) / kLanes;
  const int blocks_together = kGroups / rows_together;
  const int row = static_cast<int>(blockIdx.y) * rows_together + group % rows_together;
  const int block = static_cast<int>(blockIdx.x) * blocks_together + group / rows_together;
  const bool exists = row < a.rows && block < blocks_across;
  const int column = block * static_cast<int>(kScaleBlock) + lane * 8;
  Eight x = {};
  if (exists && column < a.k) {
    x = load_eight(static_cast<const __nv_bfloat16*>(a.x) + row * a.x_row_stride + column);
  }
  float magnitude = kLeastMagnitude;
#pragma unroll
  for (int i = 0; i < 8; ++i) magnitude = fmaxf(magnitude, fabsf(x.v[i]));
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    magnitude = fmaxf(magnitude, __shfl_xor_sync(~0u, magnitude, distance));
  }
  float scale = __fdiv_rn(magnitude, kLargestE4M3), inverse = __fdiv_rn(kLargestE4M3, magnitude);
  if (a.form == ScaleForm::kPowerOfTwo) {
    constexpr uint32_t kMantissa = 0x7FFFFF;
    scale = __uint_as_float((__float_as_uint(scale) + kMantissa) & ~kMantissa);
    inverse = __fdiv_rn(1.0f, scale);
  }
  if (a.fixed_scale != 0) {
    scale = a.fixed_scale;
    inverse = __fdiv_rn(1.0f, scale);
  }
  if (!exists) return;
#pragma unroll
  for (float& value : x.v) value *= inverse;
  auto* to = static_cast<uint8_t*>(a.values) + row * a.values_row_stride + column;
  *reinterpret_cast<uint2*>(to) = {pack_fp8<Fp8::kE4M3>(x.v[0], x.v[1], x.v[2], x.v[3]),
                                   pack_fp8<Fp8::kE4M3>(x.v[4], x.v[5], x.v[6], x.v[7])};
  if (lane == 0) a.scales[block * a.scales_block_stride + row] = scale;
}

}  // namespace

void quantize_rows(const QuantizeRowsArguments& a, cudaStream_t stream) {
  if (a.rows == 0) return;
  const int blocks = static_cast<int>(ceil_div(a.k, kScaleBlock));
  const int together =
      static_cast<int>(std::bit_ceil(static_cast<unsigned>(std::min(a.rows, kGroups))));
  launch(quantize_rows_kernel,
         {.blocks = dim3(static_cast<unsigned>(ceil_div(blocks, kGroups / together)),
                         static_cast<unsigned>(ceil_div(a.rows, together))),
          .threads = kThreads},
         stream, a, together, blocks);
}

}  // namespace fathom::cuda
