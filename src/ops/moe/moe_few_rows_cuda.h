// moe (moe_cuda.h) for few tokens an expert: bound by reading the weights. One launch.
#pragma once

#include "ops/moe/moe_cuda.h"
#include "ops/moe/moe_few_rows_plan.h"

namespace fathom::cuda {

// Up to 448 rows and 4,096 pairs of a row and an expert.
int64_t moe_few_rows_workspace_bytes(const MoeShape& shape, int32_t rows);
void moe_few_rows(const MoeArguments& arguments, cudaStream_t stream);

// The same by another plan than the shape's own, for measuring.
void moe_few_rows(const MoeFewRowsPlan& plan, const MoeArguments& arguments, cudaStream_t stream);

// Of every launch that counts with MoeArguments::progress.
int moe_few_rows_blocks();

}  // namespace fathom::cuda
