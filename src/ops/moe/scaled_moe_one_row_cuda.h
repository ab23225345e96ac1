// scaled_moe (scaled_moe_cuda.h) for one token: bound by reading the weights. One launch.
#pragma once

#include "ops/moe/scaled_moe_cuda.h"

namespace fathom::cuda {

// Whether the token's activations fit a block's shared memory.
bool scaled_moe_one_row_takes(const MoeShape& shape);

// arguments.rows is 1.
int64_t scaled_moe_one_row_workspace_bytes(const MoeShape& shape);
void scaled_moe_one_row(const ScaledMoeArguments& arguments, cudaStream_t stream);

}  // namespace fathom::cuda
