// gumbel_noise.h as nvcc compiles it, for tests.
#pragma once

#include <cstdint>

#include "device/cuda/gpu_stream.h"
#include "ops/sampling/gumbel_noise.h"

namespace fathom::cuda {

// noise[i] = token_noise(key, i, its upper half), gumbels[i] = gumbel(numbers[i]) for i < count, in
// device memory.
void compute_noise(NoiseKey key, const uint64_t* numbers, int64_t count, double* noise,
                   double* gumbels, GpuStream stream);

}  // namespace fathom::cuda
