// The sampling flags of `run` and `chat`.
#pragma once

#include <string>
#include <vector>

#include "checkpoint/generation_config.h"
#include "cli/flags.h"
#include "engine/sampling_params.h"

namespace fathom {

// Given values only; the others default to the checkpoint's or the engine's.
struct SamplingFlags {
  std::optional<double> temperature, top_p, min_p;
  std::optional<int64_t> top_k;
  std::optional<double> repetition_penalty, presence_penalty, frequency_penalty;
  std::vector<std::string> logit_bias;  // "ID=BIAS"
  std::optional<int64_t> max_tokens, min_tokens;
  std::vector<std::string> stop;
  std::vector<int32_t> stop_token_ids;
  bool ignore_eos = false;
  bool include_stop = false;
  bool keep_special_tokens = false;
};

void add_sampling_flags(CLI::App& app, SamplingFlags* flags);

// Combines flags, the checkpoint's generation_config.json and vLLM's defaults (temperature 1, all
// tokens), in this order of precedence. The engine checks ranges.
Result<SamplingParams> sampling_params(const SamplingFlags& flags,
                                       const GenerationDefaults& defaults,
                                       std::optional<int64_t> seed);

}  // namespace fathom
