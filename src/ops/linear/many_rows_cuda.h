// linear (linear_cuda.h) for any number of rows, tuned for many: compute-bound.
#pragma once

#include "device/cuda/gpu_stream.h"
#include "ops/linear/linear_cuda.h"
#include "ops/linear/many_rows_plan.h"

namespace fathom::cuda {

void linear_many_rows(const LinearArguments& arguments, GpuStream stream);

// The same with a given plan for these arguments, to compare plans.
void linear_many_rows(const LinearArguments& arguments, const ManyRowsPlan& plan, GpuStream stream);

}  // namespace fathom::cuda
