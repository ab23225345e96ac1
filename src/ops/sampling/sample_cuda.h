// sample() (ops/sampling/sample.h) on a Hopper GPU: for equal logits the same token as on the CPU.
// Both compute each term with the same operations and add terms up as integers.
//
// Log-probabilities differ from the CPU's by the last bit of fp32 at most.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>

#include "ops/sampling/device_sample_row.h"

namespace fathom::cuda {

// How often a sequence has written each token, and which its prompt has: for each slot
// token_counts_stride(vocab) words, the count in the lower 31 bits, the prompt's in the highest.
constexpr int64_t token_counts_stride(int64_t vocab) { return (vocab + 3) / 4 * 4; }

// All pointers are device memory. What a row does not use (biases, masks, counts) may be null.
struct SampleArguments {
  const float* logits = nullptr;          // [.., vocab], aligned to 16 bytes
  int64_t logits_stride = 0;              // elements from row to row, a multiple of 4
  int64_t vocab = 0;                      // up to 400,000
  const DeviceSampleRow* rows = nullptr;  // [num_rows]; no two with the same counts_slot
  int64_t num_rows = 0;
  const int32_t* bias_ids = nullptr;
  const float* bias_values = nullptr;
  const int32_t* masked_ids = nullptr;
  const uint32_t* allowed = nullptr;  // [masks, vocab / 32 rounded up]
  uint32_t* counts = nullptr;         // [slots, token_counts_stride(vocab)]

  int32_t* ids = nullptr;      // [num_rows]; -1: no finite logit left, or padding
  float* logprobs = nullptr;   // [num_rows]; of rows with num_logprobs >= 0
  int32_t* top_ids = nullptr;  // [num_rows, kDeviceTopLogprobs]; -1 behind the last
  float* top_logprobs = nullptr;
};

// One launch. A row's token does not depend on the other rows.
void sample(const SampleArguments& arguments, cudaStream_t stream);

// Makes a slot's counts anew: of these tokens (device memory) and no others.
void set_token_counts(uint32_t* slot, int64_t vocab, std::span<const int32_t> prompt,
                      std::span<const int32_t> output, cudaStream_t stream);

}  // namespace fathom::cuda
