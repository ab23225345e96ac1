// moe (moe_cuda.h) for few tokens an expert: bound by reading the weights.
#pragma once

#include "ops/moe/moe_cuda.h"

namespace fathom::cuda {

int64_t moe_few_rows_workspace_bytes(const MoeShape& shape, int32_t rows);
void moe_few_rows(const MoeArguments& arguments, cudaStream_t stream);

}  // namespace fathom::cuda
