// What: skinny GEMM out = x W^T of e4m3 with block-wise scales for up to 32 rows; bandwidth-bound.
//
// Inputs/outputs: scaled_linear_cuda.h. Work of each CTA: ops/linear/few_rows_plan.h. Layout,
// algorithm, determinism: ops/linear/few_rows_kernel_cuda.cuh.
//
// Limits: n a multiple of 8, k of 128, up to 32 rows.
//
// Measured: docs/kernels/scaled_linear.md.
#include <algorithm>

#include "device/cuda/co_resident.h"
#include "ops/linear/few_rows_cuda.h"
#include "ops/linear/few_rows_kernel_cuda.cuh"
#include "ops/scaled_linear/scaled_few_rows_cuda.h"

namespace fathom::cuda {
namespace {

FewRowsShape shape_of(const ScaledLinearArguments& a) {
  return {.rows = a.rows, .n = a.n, .k = a.k, .scaled = true};
}

template <int kColumns, int kWarpgroups>
void launch_for(const FewRowsPlan& plan, const ScaledLinearArguments& arguments, GpuStream stream) {
  const FewRowsShape shape = shape_of(arguments);
  few_rows::Arguments a = few_rows::planned<kColumns, kWarpgroups>(plan, shape);
  a.out = arguments.out;
  a.row_stride = arguments.out_row_stride;
  a.f32 = arguments.out_type == DType::kF32;
  a.weight_scales = arguments.weight_scales;
  a.weight_row_scales = arguments.weight_row_scales;
  const int token_rows = (a.rows + kGroupRows - 1) / kGroupRows * kGroupRows;
  const int64_t k = arguments.k, blocks = k / 128;
  const auto map = [&](const void* matrix, int64_t rows, int64_t row_stride, int box_rows) {
    const Axis axes[] = {{128, 1, 128}, {rows, row_stride, box_rows}, {blocks, 128, kStageHalves}};
    return e4m3_map(matrix, axes);
  };
  const auto weight_map = [&](int groups) {
    return map(arguments.weight, arguments.n, k, groups * kGroupRows);
  };
  const Axis token_axes[] = {{128, 1, 128},
                             {arguments.rows, arguments.x_row_stride, token_rows},
                             {blocks, 128, kStageHalves},
                             {1, k, 1}};
  const Axis scale_axes[] = {{arguments.rows, 1, token_rows},
                             {blocks, arguments.x_scales_stride, kStageHalves}};
  const few_rows::Maps maps = {
      {weight_map(a.tile_groups), weight_map(std::max(a.tile_groups - 1, 1))},
      e4m3_map(arguments.x, token_axes),
      f32_map(arguments.x_scales, scale_axes)};
  few_rows::launch_planned<kColumns, kWarpgroups, true>(plan, shape, maps, a, stream);
}

}  // namespace

void scaled_linear_few_rows(const FewRowsPlan& plan, const ScaledLinearArguments& arguments,
                            GpuStream stream) {
  if (arguments.rows == 0) return;
  few_rows::for_plan<true>(plan, [&]<int kColumns, int kWarpgroups>() {
    launch_for<kColumns, kWarpgroups>(plan, arguments, stream);
  });
}

void scaled_linear_few_rows(const ScaledLinearArguments& arguments, GpuStream stream) {
  scaled_linear_few_rows(plan_few_rows(shape_of(arguments), stream.device().budget().clusters,
                                       arguments.batch_invariant ? 1 : 8),
                         arguments, stream);
}

}  // namespace fathom::cuda
