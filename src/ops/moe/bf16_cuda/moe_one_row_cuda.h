// moe (moe_cuda.h) for one token: bandwidth-bound. One launch.
#pragma once

#include "device/cuda/gpu_stream.h"
#include "ops/moe/bf16_cuda/moe_cuda.h"

namespace fathom::cuda {

// Whether the token's activations fit a CTA's shared memory.
bool moe_one_row_takes(const MoeShape& shape, const SmBudget& budget);

// Precondition: arguments.rows is 1.
int64_t moe_one_row_workspace_bytes(const MoeShape& shape);
void moe_one_row(const MoeArguments& arguments, GpuStream stream);

}  // namespace fathom::cuda
