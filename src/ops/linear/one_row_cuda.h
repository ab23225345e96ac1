// linear (linear_cuda.h) for one row: bound by reading the weights, and where those are few, by how
// soon after the row is there its products are.
#pragma once

#include "ops/linear/linear_cuda.h"

namespace fathom::cuda {

// For any product of one row; one_row_pays() (one_row_plan.h) says for which it is the faster way.
// arguments.rows is 1. A row's bits depend on k alone, but are not those of other kernels.
void linear_one_row(const LinearArguments& arguments, cudaStream_t stream);

}  // namespace fathom::cuda
