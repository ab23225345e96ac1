// moe (moe_cuda.h) for few tokens an expert: bandwidth-bound. One launch.
#pragma once

#include "device/cuda/gpu_stream.h"
#include "ops/moe/bf16_cuda/moe_cuda.h"
#include "ops/moe/plans/moe_few_rows_plan.h"

namespace fathom::cuda {

// Up to 448 rows and 4,096 pairs of a row and an expert.
int64_t moe_few_rows_workspace_bytes(const MoeShape& shape, int32_t rows);
void moe_few_rows(const MoeArguments& arguments, GpuStream stream);

// As above with an explicit plan, for benchmarks.
void moe_few_rows(const MoeFewRowsPlan& plan, const MoeArguments& arguments, GpuStream stream);

// Whether the sums and lists of `rows` rows fit shared memory and each cluster's columns fit a
// wgmma.
bool moe_few_rows_takes(const MoeShape& shape, int32_t rows, const SmBudget& budget);

// CTAs of every launch that counts with MoeArguments::progress.
int moe_few_rows_blocks(const SmBudget& budget);

}  // namespace fathom::cuda
