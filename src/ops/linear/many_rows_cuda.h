// linear (linear_cuda.h) for any number of rows, made for many: bound by the tensor cores.
#pragma once

#include "ops/linear/linear_cuda.h"
#include "ops/linear/many_rows_plan.h"

namespace fathom::cuda {

void linear_many_rows(const LinearArguments& arguments, cudaStream_t stream);

// With a plan made for these arguments: to compare plans.
void linear_many_rows(const LinearArguments& arguments, const ManyRowsPlan& plan,
                      cudaStream_t stream);

}  // namespace fathom::cuda
