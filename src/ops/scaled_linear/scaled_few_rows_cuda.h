// scaled_linear (scaled_linear_cuda.h) for up to kFewScaledRows rows: skinny GEMM, bandwidth-bound.
// Otherwise as scaled_many_rows_cuda.h.
#pragma once

#include "device/cuda/gpu_stream.h"
#include "ops/linear/few_rows_plan.h"
#include "ops/scaled_linear/scaled_linear_cuda.h"

namespace fathom::cuda {

inline constexpr int kFewScaledRows = 32;

void scaled_linear_few_rows(const ScaledLinearArguments& arguments, GpuStream stream);

// The same with a plan for another shape, for measuring. Requires plan.columns >= arguments.rows.
void scaled_linear_few_rows(const FewRowsPlan& plan, const ScaledLinearArguments& arguments,
                            GpuStream stream);

}  // namespace fathom::cuda
