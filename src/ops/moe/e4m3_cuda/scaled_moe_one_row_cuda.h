// scaled_moe (scaled_moe_cuda.h) for one token: bandwidth-bound. One launch.
#pragma once

#include "device/cuda/gpu_stream.h"
#include "ops/moe/e4m3_cuda/scaled_moe_cuda.h"

namespace fathom::cuda {

// Whether the token's activations fit a CTA's shared memory.
bool scaled_moe_one_row_takes(const MoeShape& shape, const SmBudget& budget);

// Precondition: arguments.rows is 1.
int64_t scaled_moe_one_row_workspace_bytes(const MoeShape& shape);
void scaled_moe_one_row(const ScaledMoeArguments& arguments, GpuStream stream);

}  // namespace fathom::cuda
