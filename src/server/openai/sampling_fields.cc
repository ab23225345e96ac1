#include "server/openai/sampling_fields.h"

#include <limits>

#include "engine/request.h"

namespace fathom {

void read_value(const json::value& value, LogitBias& out) {
  for (const auto& [key, bias] : value.get_object()) {
    out.list.emplace_back(static_cast<int32_t>(std::stol(std::string(key))),
                          bias.to_number<float>());
  }
}

void read_value(const json::value& value, StopStrings& out) {
  if (value.is_string()) {
    read_value(value, out.list.emplace_back());
  } else {
    read_value(value, out.list);
  }
}

const ObjectSchema& SamplingFields::schema() {
  using F = SamplingFields;
  static const ObjectSchema kSchema =
      SchemaOf<F>("Sampling")
          .field("temperature", &F::temperature, number(0, kMaxTemperature),
                 "0: always the most likely token")
          .field("top_p", &F::top_p, number_above(0, 1),
                 "Sample from the smallest set of tokens with this total probability")
          .field("top_k", &F::top_k, integer(-1, kMaxInt32),
                 "Sample from this many most likely tokens; 0 and -1: all")
          .field("min_p", &F::min_p, number(0, 1),
                 "Sample from tokens with at least this share of the likeliest token's probability")
          .field("repetition_penalty", &F::repetition_penalty,
                 number(kMinRepetitionPenalty, kMaxRepetitionPenalty),
                 "Divides the logits of tokens seen in prompt or answer")
          .field("presence_penalty", &F::presence_penalty, number(-kMaxPenalty, kMaxPenalty),
                 "Subtracted from the logits of tokens in the answer")
          .field("frequency_penalty", &F::frequency_penalty, number(-kMaxPenalty, kMaxPenalty),
                 "Subtracted from the logits for each occurrence in the answer")
          .field("logit_bias", &F::logit_bias,
                 map_of(number(-kMaxLogitBias, kMaxLogitBias), kMaxLogitBiasIds),
                 "Added to the logits of these token ids")
          .field("seed", &F::seed,
                 integer(std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max()),
                 "The same seed gives the same tokens")
          .field("min_tokens", &F::min_tokens, integer(0, kMaxInt32),
                 "The answer has at least this many tokens")
          .field("stop_token_ids", &F::stop_token_ids,
                 array_of(integer(0, kMaxInt32), 0, kMaxStopTokenIds),
                 "The answer ends at any of these")
          .field("ignore_eos", &F::ignore_eos, boolean(),
                 "Continue after the end-of-sequence token")
          .field("skip_special_tokens", &F::skip_special_tokens, boolean(),
                 "Leave special tokens out of the text")
          .field("include_stop_str_in_output", &F::include_stop_str_in_output, boolean(),
                 "Keep the stop string or token in the text")
          .field("cache_salt", &F::cache_salt, string(1, 256),
                 "Share cached prefixes only with requests of the same salt")
          .field("priority", &F::priority, integer(-kMaxInt32 - 1, kMaxInt32),
                 "Lower is served earlier")
          .field("speculation", &F::speculation, integer(0, kMaxDrafts),
                 "Most drafts of the MTP layer in a step; answers are the same")
          .build();
  return kSchema;
}

SamplingParams SamplingFields::params(const ServedModel& served) const {
  SamplingParams params;
  params.temperature = temperature.value_or(served.temperature.value_or(1));
  params.top_p = top_p.value_or(served.top_p.value_or(1));
  params.top_k = top_k.value_or(served.top_k.value_or(0));
  params.min_p = min_p.value_or(0);
  params.repetition_penalty = repetition_penalty.value_or(1);
  params.presence_penalty = presence_penalty.value_or(0);
  params.frequency_penalty = frequency_penalty.value_or(0);
  params.logit_bias = logit_bias.list;
  if (seed) params.seed = static_cast<uint64_t>(*seed);
  params.min_tokens = min_tokens;
  params.stop_token_ids = stop_token_ids;
  params.ignore_eos = ignore_eos;
  params.skip_special_tokens = skip_special_tokens;
  params.include_stop_in_output = include_stop_str_in_output;
  return params;
}

const ObjectSchema& StreamOptions::schema() {
  using F = StreamOptions;
  static const ObjectSchema kSchema =
      SchemaOf<F>("StreamOptions")
          .field("include_usage", &F::include_usage, boolean(), "Add a final chunk with the usage")
          .field("continuous_usage_stats", &F::continuous_usage_stats, boolean(),
                 "The usage so far in every chunk")
          .checked("include_obfuscation", boolean(), "Accepted, has no effect")
          .build();
  return kSchema;
}

const ObjectSchema& ReplyFields::schema() {
  using F = ReplyFields;
  static const ObjectSchema kSchema =
      SchemaOf<F>("Reply")
          .field("model", &F::model, name_string(), "Any name is served by the one model")
          .field("n", &F::n, integer_up_to(1, &RequestLimits::max_choices), "Independent answers")
          .field("stop", &F::stop,
                 one_of({string(1, kMaxStopBytes),
                         array_of(string(1, kMaxStopBytes), 0, kMaxStopStrings)}),
                 "The answer ends before any of these")
          .field("stream", &F::stream, boolean(), "Answer with server-sent events")
          .field("stream_options", &F::stream_options, object_of(StreamOptions::schema()),
                 "Only with stream")
          .field("prompt_logprobs", &F::prompt_logprobs, integer(0, kMaxTopLogprobs),
                 "Log-probabilities of the prompt's tokens, with this many alternatives each")
          .field("return_token_ids", &F::return_token_ids, boolean(),
                 "Token ids of prompt and answer")
          .include(&F::transfer)
          .checked("user", string(), "Accepted, has no effect")
          .checked("metadata", any_object(), "Accepted, has no effect")
          .checked("service_tier", string(), "Accepted, has no effect")
          .checked("store", boolean(), "Accepted, nothing is stored")
          .checked("prompt_cache_key", string(), "Accepted, has no effect")
          .checked("safety_identifier", string(), "Accepted, has no effect")
          .build();
  return kSchema;
}

}  // namespace fathom
