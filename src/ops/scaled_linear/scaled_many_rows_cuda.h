// scaled_linear (scaled_linear_cuda.h) for any number of rows, tuned for many: compute-bound.
#pragma once

#include "device/cuda/gpu_stream.h"
#include "ops/linear/many_rows_plan.h"
#include "ops/scaled_linear/scaled_linear_cuda.h"

namespace fathom::cuda {

void scaled_linear_many_rows(const ScaledLinearArguments& arguments, GpuStream stream);

// The same with a given plan for these arguments, to compare plans.
void scaled_linear_many_rows(const ScaledLinearArguments& arguments, const ManyRowsPlan& plan,
                             GpuStream stream);

}  // namespace fathom::cuda
