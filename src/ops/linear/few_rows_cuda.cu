// What: skinny GEMM, out[b][m, n] = sum over k of x[b][m, k] * W[b][n, k] for up to 64 rows m in
// bf16; bandwidth-bound.
//
// Inputs/outputs: linear_cuda.h. Work of each CTA: few_rows_plan.h. Layout, algorithm and
// determinism: few_rows_kernel_cuda.cuh.
//
// Limits: n a multiple of 8, k of 64, up to 64 rows.
//
// Measured: docs/kernels/few_rows.md.
#include <algorithm>

#include "device/cuda/co_resident.h"
#include "ops/linear/few_rows_cuda.h"
#include "ops/linear/few_rows_kernel_cuda.cuh"

namespace fathom::cuda {
namespace {

template <int kColumns, int kWarpgroups>
void launch_for(const FewRowsPlan& plan, const LinearArguments& arguments, GpuStream stream) {
  const FewRowsShape shape = {
      .rows = arguments.rows, .n = arguments.n, .k = arguments.k, .batches = arguments.batches};
  few_rows::Arguments a = few_rows::planned<kColumns, kWarpgroups>(plan, shape);
  a.out = arguments.out;
  a.row_stride = arguments.out_row_stride;
  a.batch_stride = arguments.out_batch_stride;
  a.f32 = arguments.out_type == DType::kF32;
  const int token_groups = (a.rows + kGroupRows - 1) / kGroupRows;

  const int64_t k = arguments.k;
  const auto weight_map = [&](int groups) {
    const Axis axes[] = {{64, 1, 64},
                         {int64_t{arguments.batches} * arguments.n, k, groups * kGroupRows},
                         {k / 64, 64, kStageHalves}};
    return bf16_map(arguments.weight, axes);
  };
  const Axis token_axes[] = {
      {64, 1, 64},
      {arguments.rows, arguments.x_row_stride, token_groups * kGroupRows},
      {k / 64, 64, kStageHalves},
      {arguments.batches, arguments.batches == 1 ? k : arguments.x_batch_stride, 1}};
  const few_rows::Maps maps = {
      {weight_map(a.tile_groups), weight_map(std::max(a.tile_groups - 1, 1))},
      bf16_map(arguments.x, token_axes),
      {}};
  few_rows::launch_planned<kColumns, kWarpgroups, false>(plan, shape, maps, a, stream);
}

}  // namespace

void linear_few_rows(const FewRowsPlan& plan, const LinearArguments& arguments, GpuStream stream) {
  few_rows::for_plan<false>(plan, [&]<int kColumns, int kWarpgroups>() {
    launch_for<kColumns, kWarpgroups>(plan, arguments, stream);
  });
}

void linear_few_rows(const LinearArguments& arguments, GpuStream stream) {
  linear_few_rows(
      plan_few_rows({.rows = arguments.rows,
                     .n = arguments.n,
                     .k = arguments.k,
                     .batches = arguments.batches},
                    stream.device().budget().clusters, arguments.batch_invariant ? 1 : 8),
      arguments, stream);
}

}  // namespace fathom::cuda
