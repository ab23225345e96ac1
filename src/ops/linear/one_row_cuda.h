// linear (linear_cuda.h) for one row: GEMV, bandwidth-bound; for small matrices latency-bound from
// the arrival of x.
#pragma once

#include "device/cuda/gpu_stream.h"
#include "ops/linear/linear_cuda.h"

namespace fathom::cuda {

// Computes any GEMV; one_row_pays() (one_row_plan.h) says where it is faster. Requires
// arguments.rows == 1. A row's bits depend on k alone, but differ from other kernels'.
void linear_one_row(const LinearArguments& arguments, GpuStream stream);

}  // namespace fathom::cuda
