// scaled_moe (scaled_moe_cuda.h) for few tokens an expert: bound by reading the weights. One
// launch.
#pragma once

#include "ops/moe/moe_few_rows_plan.h"
#include "ops/moe/scaled_moe_cuda.h"

namespace fathom::cuda {

// Whether so many rows' sums, lists and counters have room.
bool scaled_moe_few_rows_takes(const MoeShape& shape, int32_t rows);

int64_t scaled_moe_few_rows_workspace_bytes(const MoeShape& shape, int32_t rows);
void scaled_moe_few_rows(const ScaledMoeArguments& arguments, cudaStream_t stream);

// The same by another plan than the shape's own, for measuring.
void scaled_moe_few_rows(const MoeFewRowsPlan& plan, const ScaledMoeArguments& arguments,
                         cudaStream_t stream);

}  // namespace fathom::cuda
