// linear (linear_cuda.h) for up to kFewRows rows: bound by reading the weights.
#pragma once

#include "ops/linear/few_rows_plan.h"
#include "ops/linear/linear_cuda.h"

namespace fathom::cuda {

void linear_few_rows(const LinearArguments& arguments, cudaStream_t stream);

// The same by a plan that was not made for these arguments' shape, for measuring; plan.columns is
// at least arguments.rows.
void linear_few_rows(const FewRowsPlan& plan, const LinearArguments& arguments,
                     cudaStream_t stream);

// Of this device.
ClusterCounts count_clusters();

}  // namespace fathom::cuda
