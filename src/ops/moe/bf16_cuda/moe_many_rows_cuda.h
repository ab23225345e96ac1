// moe (moe_cuda.h) for any number of tokens, tuned for many an expert: compute-bound.
#pragma once

#include "device/cuda/gpu_stream.h"
#include "ops/moe/bf16_cuda/moe_cuda.h"
#include "ops/moe/plans/moe_many_rows_plan.h"

namespace fathom::cuda {

int64_t moe_many_rows_workspace_bytes(const MoeShape& shape, int32_t rows);
void moe_many_rows(const MoeArguments& arguments, GpuStream stream);

MoeManyRowsSizes moe_many_rows_sizes(const MoeShape& shape, int64_t rows);
// The grouped GEMMs alone, of rows that are in the workspace, sorted and listed as `plan` places
// them; leaves each sorted row's result there, in bf16, and the shared expert's of x's rows. Reads
// neither ids nor weights and writes no out. shape.shared_inter 0: without the shared expert.
void moe_many_rows_products(const MoeArguments& arguments, const MoeManyRowsPlan& plan,
                            GpuStream stream);

}  // namespace fathom::cuda
