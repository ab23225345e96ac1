// moe (moe_cuda.h) for any number of tokens, made for many an expert: bound by the tensor cores.
#pragma once

#include "ops/moe/moe_cuda.h"

namespace fathom::cuda {

int64_t moe_many_rows_workspace_bytes(const MoeShape& shape, int32_t rows);
void moe_many_rows(const MoeArguments& arguments, cudaStream_t stream);

}  // namespace fathom::cuda
