// scaled_moe (scaled_moe_cuda.h) for any number of tokens, made for many an expert: bound by the
// tensor cores.
#pragma once

#include "ops/moe/scaled_moe_cuda.h"

namespace fathom::cuda {

int64_t scaled_moe_many_rows_workspace_bytes(const MoeShape& shape, int32_t rows);

// Which of its launches: benchmarks leave some of them out. What those would have left in the
// workspace must be there.
struct ScaledMoeLaunches {
  bool sort_and_gather = true, gate_up = true, down = true, combine = true;
  int32_t* tiles_taken = nullptr;  // [2], both 0: what sorting sets to 0 where it is left out
};
void scaled_moe_many_rows(const ScaledMoeArguments& arguments, cudaStream_t stream,
                          ScaledMoeLaunches launches = {});

}  // namespace fathom::cuda
