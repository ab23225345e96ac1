// gate() (gate_cuda.h) for more experts than a cluster handles quickly (256 of 7,168 columns are
// 3.7 MB): few rows on all SMs in one launch, or the selection alone, from logits of a separate
// GEMM.
#pragma once

#include <cstdint>

#include "device/cuda/gpu_stream.h"
#include "ops/gate/gate_product_cuda.cuh"

namespace fathom::cuda {

inline constexpr int64_t kMostSpreadRows = 128;

// Requires bf16 weights. sms: SM budget of the launch. partial: gate_spread_words() words, every
// bit set before the first launch, restored by each launch.
int64_t gate_spread_words(int64_t rows, int64_t experts, int64_t hidden, int sms);
void gate_spread(const GateShape& shape, float* partial, int sms, GpuStream stream);

// logits [rows, experts] in device memory. Does not read the shape's x and weights.
void gate_choose(const GateShape& shape, const float* logits, GpuStream stream);

}  // namespace fathom::cuda
