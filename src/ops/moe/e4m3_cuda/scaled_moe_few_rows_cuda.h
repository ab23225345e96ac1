// scaled_moe (scaled_moe_cuda.h) for few tokens an expert: bandwidth-bound. One launch.
#pragma once

#include "device/cuda/gpu_stream.h"
#include "ops/moe/e4m3_cuda/scaled_moe_cuda.h"
#include "ops/moe/plans/moe_few_rows_plan.h"

namespace fathom::cuda {

// Whether the sums, lists and counters of `rows` rows fit and each cluster's columns fit a wgmma.
bool scaled_moe_few_rows_takes(const MoeShape& shape, int32_t rows, const SmBudget& budget);

int64_t scaled_moe_few_rows_workspace_bytes(const MoeShape& shape, int32_t rows);
void scaled_moe_few_rows(const ScaledMoeArguments& arguments, GpuStream stream);

// As above with an explicit plan, for benchmarks.
void scaled_moe_few_rows(const MoeFewRowsPlan& plan, const ScaledMoeArguments& arguments,
                         GpuStream stream);

}  // namespace fathom::cuda
