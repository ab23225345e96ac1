// linear (linear_cuda.h) for any number of rows, tuned for many: compute-bound.
#pragma once

#include "ops/linear/linear_cuda.h"
#include "ops/linear/many_rows_plan.h"

namespace fathom::cuda {

void linear_many_rows(const LinearArguments& arguments, cudaStream_t stream);

// The same with a given plan for these arguments, to compare plans.
void linear_many_rows(const LinearArguments& arguments, const ManyRowsPlan& plan,
                      cudaStream_t stream);

}  // namespace fathom::cuda
