// scaled_absorb() (scaled_absorb_cuda.h) for many rows: x stays in bf16, weights are upconverted to
// bf16 in shared memory.
#pragma once

#include "device/cuda/gpu_stream.h"
#include "ops/scaled_linear/scaled_absorb_cuda.h"

namespace fathom::cuda {

// x [rows, heads, k], out [rows, heads, n]; weight as scaled_absorb() takes it.
void wide_absorb(const ScaledAbsorbPlan& plan, const ScaledAbsorbArguments& arguments,
                 GpuStream stream);

}  // namespace fathom::cuda
