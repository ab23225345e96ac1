// Fields for sampling and reporting that the endpoints share.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/sampling_params.h"
#include "server/openai/schema.h"
#include "server/openai/served_model.h"
#include "server/openai/transfer_fields.h"

namespace fathom {

// {"42": -100}
struct LogitBias {
  std::vector<std::pair<int32_t, float>> list;
};
void read_value(const json::value& value, LogitBias& out);

// Accepts one string or several.
struct StopStrings {
  std::vector<std::string> list;
};
void read_value(const json::value& value, StopStrings& out);

// Fields of every generating endpoint.
struct SamplingFields {
  std::optional<double> temperature, top_p, min_p;
  std::optional<int64_t> top_k;
  std::optional<double> repetition_penalty, presence_penalty, frequency_penalty;
  LogitBias logit_bias;
  std::optional<int64_t> seed;
  int64_t min_tokens = 0;
  std::vector<int32_t> stop_token_ids;
  bool ignore_eos = false;
  bool skip_special_tokens = true;
  bool include_stop_str_in_output = false;
  std::string cache_salt;
  int64_t priority = 0;
  std::optional<int64_t> speculation;

  static const ObjectSchema& schema();

  // Returns parameters from these fields over the model's defaults. The caller sets stop,
  // max_tokens, n and log-probabilities.
  SamplingParams params(const ServedModel& model) const;
};

struct StreamOptions {
  bool include_usage = false;
  bool continuous_usage_stats = false;

  static const ObjectSchema& schema();
};

// Fields of OpenAI's two generating endpoints, chat and completions.
struct ReplyFields {
  std::string model;
  int64_t n = 1;
  StopStrings stop;
  bool stream = false;
  StreamOptions stream_options;
  std::optional<int64_t> prompt_logprobs;
  bool return_token_ids = false;
  TransferFields transfer;

  static const ObjectSchema& schema();
};

}  // namespace fathom
