// moe (moe_cuda.h) for any number of tokens, tuned for many an expert: compute-bound.
#pragma once

#include "device/cuda/gpu_stream.h"
#include "ops/moe/bf16_cuda/moe_cuda.h"

namespace fathom::cuda {

int64_t moe_many_rows_workspace_bytes(const MoeShape& shape, int32_t rows);
void moe_many_rows(const MoeArguments& arguments, GpuStream stream);

}  // namespace fathom::cuda
