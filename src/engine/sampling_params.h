// Sampling parameters of a request, and its stop conditions.
//
// Log-probabilities are the model's: log-softmax of the raw logits, before bias, penalties,
// temperature and truncation (vLLM's raw_logprobs).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"

namespace fathom {

// Limits that do not depend on the model. They are the official API schema's where it has one.
inline constexpr double kMaxTemperature = 2;
inline constexpr double kMaxPenalty = 2;               // presence and frequency: [-2, 2]
inline constexpr double kMaxRepetitionPenalty = 10;    // text degenerates already beyond 2
inline constexpr double kMinRepetitionPenalty = 0.01;  // dividing logits by less may overflow
inline constexpr float kMaxLogitBias = 100;
inline constexpr size_t kMaxLogitBiasIds = 1024;
inline constexpr size_t kMaxStopStrings = 16;
inline constexpr size_t kMaxStopBytes = 256;
inline constexpr size_t kMaxStopTokenIds = 16;
inline constexpr int kMaxChoices = 128;
inline constexpr int kMaxTopLogprobs = 20;

struct SamplingParams {
  double temperature = 1;  // [0, 2]; below 1e-5: greedy
  double top_p = 1;        // (0, 1]
  double min_p = 0;        // [0, 1], relative to the most likely token's probability
  int64_t top_k = 0;       // 0 or -1: all
  // [0.01, 10], over prompt and output; divides positive logits, multiplies negative ones.
  double repetition_penalty = 1;
  double presence_penalty = 0;  // presence and frequency: over the output only
  double frequency_penalty = 0;
  std::vector<std::pair<int32_t, float>> logit_bias = {};  // added to the logits of these ids
  std::optional<uint64_t> seed =
      {};  // none: a new one per request. Same seed, same tokens, in any batch

  std::optional<int64_t> max_tokens = 16;  // none: up to the end of the context
  int64_t min_tokens = 0;                  // no end-of-sequence id, stop id or stop string before
  std::vector<std::string> stop = {};      // the text ends before the first match
  std::vector<int32_t> stop_token_ids = {};
  bool ignore_eos = false;
  bool include_stop_in_output = false;
  bool skip_special_tokens = true;

  int n = 1;                 // choices, one sequence each
  int logprobs = -1;         // -1: none; otherwise alternatives per token, 0 … 20
  int prompt_logprobs = -1;  // the same for prompt tokens

  // Checks all limits except those on the context's length, which admission checks. The error names
  // the field, its value and the limit.
  Result<> validate(int64_t vocab_size) const;
};

}  // namespace fathom
