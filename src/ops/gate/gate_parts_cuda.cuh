// Partial logits that the CTAs of one launch write to device memory, [parts, rows, experts], for
// the CTA that selects for the row. No counters: a partial sum has arrived when its word no longer
// holds the mark kMissing; the reader restores the mark.
#pragma once

#include <cstdint>

#include "ops/gate/gate_block_choice_cuda.cuh"
#include "ops/gate/gate_product_cuda.cuh"

namespace fathom::cuda {

inline constexpr uint32_t kMissing = ~0u;  // a NaN that no arithmetic produces

__device__ inline int64_t valid_rows(const GateShape& shape) {
  return shape.num_valid_rows == nullptr ? shape.rows : *shape.num_valid_rows;
}

// Distributes the launch's rows over the CTAs; logit(row, expert) is called by the thread that has
// the expert.
template <int kPerThread, typename Logit>
__device__ inline void choose_for_rows(const GateShape& shape, int64_t valid,
                                       BlockChoice<kPerThread>& choice, const Logit& logit) {
  const int64_t k = shape.options.experts_per_token;
  for (int64_t row = blockIdx.x; row < shape.rows; row += gridDim.x) {
    float logits[kPerThread];
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      logits[j] = choice.has(j) ? logit(row, choice.expert(j)) : 0;
    }
    if (row >= valid) {
      if (threadIdx.x < kWarp) write_no_experts(shape, row, static_cast<int>(threadIdx.x));
      continue;
    }
    choice.run(logits, shape.expert_ids + row * k, shape.expert_weights + row * k);
  }
}

// Waits for all [parts] words, `stride` apart, and marks them missing again. Branch-free: surplus
// iterations read the last part again.
template <int kMostParts>
__device__ inline float sum_of_parts(float* from, int parts, int stride) {
  const auto at = [&](int part) { return from + int64_t{min(part, parts - 1)} * stride; };
  float values[kMostParts];
  bool missing;
  do {
    missing = false;
#pragma unroll
    for (int part = 0; part < kMostParts; ++part) values[part] = load_shared_word(at(part));
#pragma unroll
    for (int part = 0; part < kMostParts; ++part) {
      missing |= __float_as_uint(values[part]) == kMissing;
    }
  } while (missing);
  float sum = 0;
#pragma unroll
  for (int part = 0; part < kMostParts; ++part) {
    sum += part < parts ? values[part] : 0;
    *at(part) = __uint_as_float(kMissing);
  }
  return sum;
}

}  // namespace fathom::cuda
