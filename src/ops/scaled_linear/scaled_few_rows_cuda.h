// Scaled products (scaled_linear_cuda.h) for up to kFewScaledRows rows: bound by reading the
// weights. The rest as scaled_many_rows_cuda.h says.
#pragma once

#include "ops/linear/few_rows_plan.h"
#include "ops/scaled_linear/scaled_linear_cuda.h"

namespace fathom::cuda {

inline constexpr int kFewScaledRows = 32;

void scaled_linear_few_rows(const ScaledLinearArguments& arguments, cudaStream_t stream);

// The same by a plan that was not made for these arguments' shape, for measuring; plan.columns is
// at least arguments.rows.
void scaled_linear_few_rows(const FewRowsPlan& plan, const ScaledLinearArguments& arguments,
                            cudaStream_t stream);

}  // namespace fathom::cuda
