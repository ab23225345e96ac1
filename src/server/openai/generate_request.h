// Body of POST /generate, SGLang's endpoint: text or token ids in; text, ids and log-probabilities
// out.
#pragma once

#include <optional>
#include <string>

#include "server/openai/completion_request.h"

namespace fathom {

inline constexpr int64_t kDefaultMaxNewTokens = 128;

struct GenerateSampling {
  // Default: kDefaultMaxNewTokens, or what the context has left.
  std::optional<int64_t> max_new_tokens;
  int64_t min_new_tokens = 0;
  int64_t n = 1;
  StopStrings stop;
  SamplingFields sampling;
  std::string json_schema, regex, ebnf;

  static const ObjectSchema& schema();
};

struct GenerateRequest {
  std::optional<PromptList> text, input_ids;
  GenerateSampling sampling_params;
  bool stream = false;
  bool return_logprob = false;
  int64_t top_logprobs_num = 0;
  int64_t logprob_start_len = -1;  // first prompt token with log-probabilities; -1: none
  std::string rid;
  json::value lora_path;  // SGLang's; refused
  TransferFields transfer;

  static const ObjectSchema& schema();
};

}  // namespace fathom
