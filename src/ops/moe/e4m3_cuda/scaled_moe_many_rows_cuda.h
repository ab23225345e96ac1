// scaled_moe (scaled_moe_cuda.h) for any number of tokens, tuned for many an expert: compute-bound.
#pragma once

#include "device/cuda/gpu_stream.h"
#include "ops/moe/e4m3_cuda/scaled_moe_cuda.h"
#include "ops/moe/plans/moe_many_rows_plan.h"

namespace fathom::cuda {

int64_t scaled_moe_many_rows_workspace_bytes(const MoeShape& shape, int32_t rows);

// Selects launches, so that benchmarks can skip some. The workspace must hold what skipped launches
// would have written.
struct ScaledMoeLaunches {
  bool sort_and_gather = true, gate_up = true, down = true, combine = true;
  int32_t* tiles_taken = nullptr;  // [2], both 0: sort zeroes them unless it is skipped
};
void scaled_moe_many_rows(const ScaledMoeArguments& arguments, GpuStream stream,
                          ScaledMoeLaunches launches = {});

MoeManyRowsSizes scaled_moe_many_rows_sizes(const MoeShape& shape, int64_t rows);
// The grouped GEMMs alone, as moe_many_rows_products().
void scaled_moe_many_rows_products(const ScaledMoeArguments& arguments, const MoeManyRowsPlan& plan,
                                   GpuStream stream);

}  // namespace fathom::cuda
