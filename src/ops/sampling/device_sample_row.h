// One row's options as the GPU sampler reads them: plain numbers in device memory, so that a
// captured launch samples with the options of the current step. Made by SampleBatch.
#pragma once

#include <cstdint>

#include "ops/sampling/gumbel_noise.h"

namespace fathom {

inline constexpr int64_t kMostDeviceVocab = 400'000;  // limit of the sampler
inline constexpr int kDeviceTopLogprobs = 20;         // most alternatives of a row

// A token that a sequence has seen, and how often it was generated: the input of penalties.
struct SeenToken {
  int32_t id = 0;
  int32_t output_count = 0;  // 0: only in the prompt
};

struct DeviceSampleRow {
  NoiseKey noise;          // of the draw
  double top_p = 1;        // 1: all
  double min_p_depth = 0;  // temperature * log(min_p); has_min_p says whether it counts
  double repetition_penalty = 1, presence_penalty = 0, frequency_penalty = 0;
  float inverse_temperature = 0;  // 0: the largest logit wins
  int32_t has_min_p = 0;
  int32_t row = -1;                      // index of the logits; -1: padding
  int32_t top_k = 0;                     // 0: all
  int32_t given_id = -1;                 // >= 0: fixed token, no draw
  int32_t num_logprobs = -1;             // -1: no log-probability
  int32_t allowed_row = -1;              // index of the bit mask; -1: all allowed
  int32_t first_seen = 0, num_seen = 0;  // 0 without penalties
  int32_t first_bias = 0, num_biases = 0;
  int32_t first_masked = 0, num_masked = 0;
  int32_t unused = 0;  // pads to a multiple of 8 bytes
};

}  // namespace fathom
