// What: quantizes rows by blocks of 128 columns: the largest magnitude, and e4m3 of the values over
// the scale.
//
// Inputs/outputs: quantize_rows_cuda.h.
//
// Layout: sixteen lanes a block of 128, 16 bytes of x and 8 of the result each. The 16 such groups
// of a CTA take neighbouring rows of the same columns, as many as there are, so that their scales
// are neighbours in memory.
//
// Determinism: bitwise identical to quantize_block().
//
// Limits: bandwidth-bound: reads 2 bytes a value and writes 1.03.
//
// Measured: docs/kernels/scaled_linear.md.
#include <algorithm>
#include <bit>

#include "base/math.h"
#include "device/cuda/launch.h"
#include "device/cuda/rows.cuh"
#include "ops/scaled_linear/quantize_block_cuda.cuh"
#include "ops/scaled_linear/quantize_rows_cuda.h"

namespace fathom::cuda {
namespace {

constexpr int kThreads = 256, kGroups = kThreads / kBlockLanes;

// rows_together: rows of a CTA, a power of two up to kGroups.
__global__ void __launch_bounds__(kThreads)
    quantize_rows_kernel(const __grid_constant__ QuantizeRowsArguments a, int rows_together,
                         int blocks_across) {
  wait_for_earlier_launches();
  let_next_launch_begin();
  const int lane = static_cast<int>(threadIdx.x) % kBlockLanes,
            group = static_cast<int>(threadIdx.x) / kBlockLanes;
  const int blocks_together = kGroups / rows_together;
  const int row = static_cast<int>(blockIdx.y) * rows_together + group % rows_together;
  const int block = static_cast<int>(blockIdx.x) * blocks_together + group / rows_together;
  const bool exists = row < a.rows && block < blocks_across;
  const int column = block * static_cast<int>(kScaleBlock) + lane * 8;
  uint4 x = {};
  if (exists && column < a.k) {
    x = *reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(a.x) +
                                        row * a.x_row_stride + column);
  }
  const BlockScale scale = block_scale(block_magnitude(x), a.form, a.fixed_scale);
  if (!exists) return;
  auto* to = static_cast<uint8_t*>(a.values) + row * a.values_row_stride + column;
  *reinterpret_cast<uint2*>(to) = pack_e4m3(x, scale.inverse);
  if (lane == 0) a.scales[block * a.scales_block_stride + row] = scale.scale;
}

}  // namespace

void quantize_rows(const QuantizeRowsArguments& a, GpuStream stream) {
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
