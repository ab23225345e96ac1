// scaled_moe (scaled_moe_cuda.h) for any number of tokens, tuned for many an expert: compute-bound.
#pragma once

#include "device/cuda/gpu_stream.h"
#include "ops/moe/e4m3_cuda/scaled_moe_cuda.h"

namespace fathom::cuda {

int64_t scaled_moe_many_rows_workspace_bytes(const MoeShape& shape, int32_t rows);

// Selects launches, so that benchmarks can skip some. The workspace must hold what skipped launches
// would have written.
struct ScaledMoeLaunches {
  bool sort_and_gather = true, gate_up = true, down = true, combine = true;
  int32_t* tiles_taken = nullptr;  // [2], both 0: sort zeroes them unless it is skipped
};
void scaled_moe_many_rows(const ScaledMoeArguments& arguments, GpuStream stream,
                          ScaledMoeLaunches launches = {});

}  // namespace fathom::cuda
