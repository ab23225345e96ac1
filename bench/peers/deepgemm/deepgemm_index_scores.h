// DeepGEMM's index scores of prompts (sm90_fp8_mqa_logits), 64 heads of 128. Built from a checkout
// that its user names; see README.md.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace fathom::peers {

// scores[r, s] = scale(s) * sum over heads of weight(r, h) * max(0, q(r, h) . k(s)) for the keys
// begin[r] <= s < end[r] of each row; other scores are written too, with any value. All device
// memory.
struct DeepGemmScores {
  const void* queries = nullptr;                   // [rows, 64, 128] e4m3
  const void* keys = nullptr;                      // [num_keys, 128] e4m3
  const float* scales = nullptr;                   // [num_keys]
  const float* weights = nullptr;                  // [rows, 64]
  const int32_t *begin = nullptr, *end = nullptr;  // [rows]
  float* scores = nullptr;                         // [rows, columns]
  int32_t rows = 0, num_keys = 0, columns = 0;     // num_keys a multiple of 256
};

void deepgemm_index_scores(const DeepGemmScores& arguments, cudaStream_t stream);

}  // namespace fathom::peers
