// linear (linear_cuda.h) for up to kFewRows rows: skinny GEMM, bandwidth-bound.
#pragma once

#include "device/cuda/gpu_stream.h"
#include "ops/linear/few_rows_plan.h"
#include "ops/linear/linear_cuda.h"

namespace fathom::cuda {

void linear_few_rows(const LinearArguments& arguments, GpuStream stream);

// The same with a plan for another shape, for measuring. Requires plan.columns >= arguments.rows.
void linear_few_rows(const FewRowsPlan& plan, const LinearArguments& arguments, GpuStream stream);

}  // namespace fathom::cuda
