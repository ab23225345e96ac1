#include "engine/sampling_params.h"

#include <cmath>

#include "base/utf8.h"

namespace fathom {
namespace {

Result<> check_range(const char* field, double value, double low, double high) {
  if (value >= low && value <= high) return {};  // false for NaN
  return invalid("{} is {}, must be between {} and {}", field, value, low, high);
}

Result<> check_above_zero(const char* field, double value, double high) {
  if (value > 0 && value <= high) return {};
  return invalid("{} is {}, must be above 0 and at most {}", field, value, high);
}

Result<> check_ids(const char* field, const std::vector<int32_t>& ids, int64_t vocab_size) {
  for (const int32_t id : ids) {
    if (id < 0 || id >= vocab_size) {
      return invalid("{} has the id {}, outside the vocabulary of {}", field, id, vocab_size);
    }
  }
  return {};
}

Result<> check_stop(const std::vector<std::string>& stop) {
  if (stop.size() > kMaxStopStrings) {
    return invalid("stop has {} strings, at most {} are allowed", stop.size(), kMaxStopStrings);
  }
  for (size_t i = 0; i < stop.size(); ++i) {
    if (stop[i].empty()) return invalid("stop[{}] is empty", i);
    if (stop[i].size() > kMaxStopBytes) {
      return invalid("stop[{}] has {} bytes, at most {} are allowed", i, stop[i].size(),
                     kMaxStopBytes);
    }
    if (!is_valid_utf8(stop[i])) return invalid("stop[{}] is not valid UTF-8", i);
  }
  return {};
}

Result<> check_logit_bias(const std::vector<std::pair<int32_t, float>>& logit_bias,
                          int64_t vocab_size) {
  if (logit_bias.size() > kMaxLogitBiasIds) {
    return invalid("logit_bias has {} ids, at most {} are allowed", logit_bias.size(),
                   kMaxLogitBiasIds);
  }
  for (const auto& [id, bias] : logit_bias) {
    if (id < 0 || id >= vocab_size) {
      return invalid("logit_bias has the id {}, outside the vocabulary of {}", id, vocab_size);
    }
    if (!(std::abs(bias) <= kMaxLogitBias)) {
      return invalid("logit_bias of id {} is {}, must be between {} and {}", id, bias,
                     -kMaxLogitBias, kMaxLogitBias);
    }
  }
  return {};
}

}  // namespace

Result<> SamplingParams::validate(int64_t vocab_size) const {
  FATHOM_RETURN_IF_ERROR(check_range("temperature", temperature, 0, kMaxTemperature));
  FATHOM_RETURN_IF_ERROR(check_above_zero("top_p", top_p, 1));
  FATHOM_RETURN_IF_ERROR(check_range("min_p", min_p, 0, 1));
  if (top_k < -1) return invalid("top_k is {}, must be -1 (all) or more", top_k);
  FATHOM_RETURN_IF_ERROR(check_range("repetition_penalty", repetition_penalty,
                                     kMinRepetitionPenalty, kMaxRepetitionPenalty));
  FATHOM_RETURN_IF_ERROR(
      check_range("presence_penalty", presence_penalty, -kMaxPenalty, kMaxPenalty));
  FATHOM_RETURN_IF_ERROR(
      check_range("frequency_penalty", frequency_penalty, -kMaxPenalty, kMaxPenalty));
  FATHOM_RETURN_IF_ERROR(check_logit_bias(logit_bias, vocab_size));
  if (max_tokens && *max_tokens < 1) {
    return invalid("max_tokens is {}, must be 1 or more", *max_tokens);
  }
  if (min_tokens < 0) return invalid("min_tokens is {}, must be 0 or more", min_tokens);
  if (max_tokens && min_tokens > *max_tokens) {
    return invalid("min_tokens is {}, more than max_tokens, {}", min_tokens, *max_tokens);
  }
  FATHOM_RETURN_IF_ERROR(check_stop(stop));
  if (stop_token_ids.size() > kMaxStopTokenIds) {
    return invalid("stop_token_ids has {} ids, at most {} are allowed", stop_token_ids.size(),
                   kMaxStopTokenIds);
  }
  FATHOM_RETURN_IF_ERROR(check_ids("stop_token_ids", stop_token_ids, vocab_size));
  if (n < 1 || n > kMaxChoices) {
    return invalid("n is {}, must be between 1 and {}", n, kMaxChoices);
  }
  if (logprobs < -1 || logprobs > kMaxTopLogprobs) {
    return invalid("logprobs is {}, must be between 0 and {}", logprobs, kMaxTopLogprobs);
  }
  if (prompt_logprobs < -1 || prompt_logprobs > kMaxTopLogprobs) {
    return invalid("prompt_logprobs is {}, must be between 0 and {}", prompt_logprobs,
                   kMaxTopLogprobs);
  }
  return {};
}

}  // namespace fathom
