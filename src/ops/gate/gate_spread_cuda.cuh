// gate() (gate_cuda.h) of more experts than a cluster gets through quickly, 256 of 7,168 columns,
// which are 3.7 MB: few rows by all multiprocessors in one launch, or the choice alone, of logits
// that a product has made.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ops/gate/gate_product_cuda.cuh"

namespace fathom::cuda {

inline constexpr int64_t kMostSpreadRows = 128;

// Of weights in bf16. partial: gate_spread_words(), every bit set before the first launch, left as
// later ones want it.
int64_t gate_spread_words(int64_t rows, int64_t experts, int64_t hidden);
void gate_spread(const GateShape& shape, float* partial, cudaStream_t stream);

// logits [rows, experts] in device memory. Of the shape neither x nor the weights are read.
void gate_choose(const GateShape& shape, const float* logits, cudaStream_t stream);

}  // namespace fathom::cuda
