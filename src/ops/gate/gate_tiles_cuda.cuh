// gate() (gate_cuda.h) of some dozen to some hundred rows and as many experts as V3's 256 of 7,168
// columns, by all multiprocessors in one launch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ops/gate/gate_product_cuda.cuh"

namespace fathom::cuda {

inline constexpr int64_t kMostTiledRows = 256;

// There is room for a block's part of the weights.
bool gate_can_tile(int64_t experts, int64_t hidden);

// Of weights in bf16. partial: gate_tiles_words(), every bit set before the first launch, left as
// later ones want it.
int64_t gate_tiles_words(int64_t rows, int64_t experts, int64_t hidden);
void gate_tiles(const GateShape& shape, float* partial, cudaStream_t stream);

}  // namespace fathom::cuda
