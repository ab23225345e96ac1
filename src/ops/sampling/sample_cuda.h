// sample() (ops/sampling/sample.h) on a Hopper GPU: bitwise equal logits give the same token as on
// the CPU. Both compute each term with the same operations and add terms up as integers.
//
// Log-probabilities differ from the CPU's by the last bit of fp32 at most.
#pragma once

#include <cstdint>

#include "device/cuda/gpu_stream.h"
#include "ops/sampling/device_sample_row.h"

namespace fathom::cuda {

// All pointers are device memory. Unused ones (biases, masks, seen tokens) may be null.
struct SampleArguments {
  const float* logits = nullptr;          // [.., vocab], aligned to 16 bytes
  int64_t logits_stride = 0;              // elements from row to row, a multiple of 4
  int64_t vocab = 0;                      // up to 400,000
  const DeviceSampleRow* rows = nullptr;  // [num_rows]
  int64_t num_rows = 0;
  const int32_t* bias_ids = nullptr;
  const float* bias_values = nullptr;
  const SeenToken* seen = nullptr;  // each token of a row once
  const int32_t* masked_ids = nullptr;
  const uint32_t* allowed = nullptr;  // [masks, vocab / 32 rounded up]

  int32_t* ids = nullptr;      // [num_rows]; -1: no finite logit left, or padding
  float* logprobs = nullptr;   // [num_rows]; of rows with num_logprobs >= 0
  int32_t* top_ids = nullptr;  // [num_rows, kDeviceTopLogprobs]; -1 behind the last
  float* top_logprobs = nullptr;
};

// One launch. A row's token does not depend on the other rows.
void sample(const SampleArguments& arguments, GpuStream stream);

}  // namespace fathom::cuda
