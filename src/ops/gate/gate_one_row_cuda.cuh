// gate (gate_cuda.h) for one row with fp32 weights.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/gate/gate_product_cuda.cuh"

namespace fathom::cuda {

bool gate_one_row_takes(const GateShape& shape);
void gate_one_row(const GateShape& shape, cudaStream_t stream);

}  // namespace fathom::cuda
