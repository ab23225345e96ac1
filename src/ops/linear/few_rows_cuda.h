// linear (linear_cuda.h) for up to kFewRows rows: skinny GEMM, bandwidth-bound.
#pragma once

#include "ops/linear/few_rows_plan.h"
#include "ops/linear/linear_cuda.h"

namespace fathom::cuda {

void linear_few_rows(const LinearArguments& arguments, cudaStream_t stream);

// The same with a plan for another shape, for measuring. Requires plan.columns >= arguments.rows.
void linear_few_rows(const FewRowsPlan& plan, const LinearArguments& arguments,
                     cudaStream_t stream);

}  // namespace fathom::cuda
