// linear (linear_cuda.h) for up to kFewRows rows: bound by reading the weights.
#pragma once

#include "ops/linear/linear_cuda.h"

namespace fathom::cuda {

void linear_few_rows(const LinearArguments& arguments, cudaStream_t stream);

}  // namespace fathom::cuda
