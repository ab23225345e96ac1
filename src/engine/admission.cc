#include "engine/admission.h"

#include <algorithm>
#include <utility>

#include "base/math.h"
#include "cache/latent_layout.h"
#include "model/forward_batch.h"

namespace fathom {
namespace {

Result<> check_prompt(const std::vector<int32_t>& prompt_ids, int64_t vocab_size) {
  if (prompt_ids.empty()) return invalid("the prompt has no tokens");
  for (size_t i = 0; i < prompt_ids.size(); ++i) {
    if (prompt_ids[i] < 0 || prompt_ids[i] >= vocab_size) {
      return invalid("prompt_ids[{}] is {}, outside the vocabulary of {}", i, prompt_ids[i],
                     vocab_size);
    }
  }
  return {};
}

// The maximal length of the sequence: prompt and max_tokens.
Result<int64_t> resolve_max_len(int64_t prompt_len, const SamplingParams& params,
                                const AdmissionLimits& limits) {
  const int64_t cache_tokens = limits.num_pages * kPageSize;
  if (!params.max_tokens) {
    // The last token is never in the cache.
    const int64_t max_len = std::min(limits.max_model_len, cache_tokens + 1);
    if (prompt_len >= max_len) {
      return invalid("the prompt has {} tokens, which leaves no room to answer: the limit is {}",
                     prompt_len, max_len);
    }
    if (params.min_tokens > max_len - prompt_len) {
      return invalid("min_tokens is {}, but after the prompt's {} tokens only {} fit",
                     params.min_tokens, prompt_len, max_len - prompt_len);
    }
    return max_len;
  }
  if (prompt_len >= limits.max_model_len ||
      *params.max_tokens > limits.max_model_len - prompt_len) {
    return invalid(
        "the prompt has {} tokens and max_tokens is {}, together more than the context "
        "of {} tokens",
        prompt_len, *params.max_tokens, limits.max_model_len);
  }
  const int64_t max_len = prompt_len + *params.max_tokens;
  if (max_len - 1 > cache_tokens) {
    return invalid(
        "the prompt's {} tokens and max_tokens {} need {} pages of {} tokens, the cache "
        "has {}",
        prompt_len, *params.max_tokens, ceil_div(max_len - 1, kPageSize), kPageSize,
        limits.num_pages);
  }
  return max_len;
}

// Sums biases by id. A device adds biases in no fixed order, so each id must occur once.
std::vector<std::pair<int32_t, float>> summed_by_id(std::vector<std::pair<int32_t, float>> bias) {
  std::sort(bias.begin(), bias.end());
  size_t count = 0;
  for (const auto& [id, value] : bias) {
    if (count > 0 && bias[count - 1].first == id) {
      bias[count - 1].second += value;
    } else {
      bias[count++] = {id, value};
    }
  }
  bias.resize(count);
  return bias;
}

SampleOptions sample_options(const SamplingParams& params, uint64_t seed, int index) {
  return {.temperature = params.temperature,
          .top_p = params.top_p,
          .min_p = params.min_p,
          .top_k = params.top_k,
          .repetition_penalty = params.repetition_penalty,
          .presence_penalty = params.presence_penalty,
          .frequency_penalty = params.frequency_penalty,
          .logit_bias = summed_by_id(params.logit_bias),
          .seed = params.seed.value_or(seed),
          .stream = static_cast<uint64_t>(index)};
}

std::unique_ptr<Sequence> make_sequence(ActiveRequest& active, int index, int64_t max_len,
                                        const AdmissionLimits& limits, uint64_t seed) {
  const SamplingParams& params = active.request.sampling;
  auto sequence = std::make_unique<Sequence>();
  sequence->request = &active;
  sequence->index = index;
  sequence->priority = active.request.priority;
  sequence->tokens = active.request.prompt_ids;
  sequence->prompt_len = sequence->len();
  sequence->max_len = max_len;
  sequence->usage.prompt_tokens = sequence->prompt_len;
  sequence->max_drafts = active.request.max_drafts.value_or(kMaxDrafts);
  sequence->num_logprobs = params.logprobs;
  sequence->sample_options = sample_options(params, seed, index);
  if (sequence->sample_options.has_penalties()) {
    sequence->history = std::make_unique<TokenHistory>();
    sequence->history->add_prompt(sequence->tokens);
  }
  sequence->stop_ids = params.stop_token_ids;
  sequence->num_own_stop_ids = std::ssize(sequence->stop_ids);
  if (!params.ignore_eos) {
    sequence->stop_ids.insert(sequence->stop_ids.end(), limits.eos_ids.begin(),
                              limits.eos_ids.end());
  }
  if (active.request.page_export) {
    sequence->is_prompt_only = true;
    sequence->pages_sent = active.request.export_from;
    return sequence;
  }
  if (index == 0 && params.prompt_logprobs >= 0) {
    sequence->prompt_logits_end = sequence->prompt_len - 1;
    sequence->prompt_logprobs.push_back(std::nullopt);
  }
  if (active.request.grammar) {
    sequence->grammar = active.request.grammar->start(active.request.grammar_begins_after);
  }
  if (limits.tokenizer != nullptr) {
    sequence->detokenizer.emplace(*limits.tokenizer, params.skip_special_tokens);
    sequence->stop_filter.emplace(params.stop, params.include_stop_in_output);
  }
  return sequence;
}

}  // namespace

Result<std::unique_ptr<ActiveRequest>> make_active_request(Request request, EventSink sink,
                                                           const AdmissionLimits& limits,
                                                           uint64_t seed) {
  FATHOM_RETURN_IF_ERROR(check_prompt(request.prompt_ids, limits.vocab_size));
  FATHOM_RETURN_IF_ERROR(request.sampling.validate(limits.vocab_size));
  if (request.lane && (*request.lane < 0 || *request.lane >= limits.num_lanes)) {
    return invalid("the data-parallel rank is {}, there are {}: 0 to {}", *request.lane,
                   limits.num_lanes, limits.num_lanes - 1);
  }
  if (const auto& drafts = request.max_drafts; drafts && (*drafts < 0 || *drafts > kMaxDrafts)) {
    return invalid("speculation is {}, must be 0 to {}", *drafts, kMaxDrafts);
  }
  if (request.page_export && !limits.can_export) {
    return invalid("this engine cannot send pages to another one");
  }
  if (request.page_export &&
      (request.sampling.n != 1 || request.export_from < 0 ||
       request.export_from >= ceil_div(std::ssize(request.prompt_ids), kPageSize))) {
    return invalid("export_from is {} and n {}, a prompt of {} tokens has pages from 0 on for one",
                   request.export_from, request.sampling.n, request.prompt_ids.size());
  }
  if (request.cache_salt.size() > kMaxCacheSaltBytes) {
    return invalid("cache_salt has {} bytes, at most {} are allowed", request.cache_salt.size(),
                   kMaxCacheSaltBytes);
  }
  if (!request.sampling.stop.empty() && limits.tokenizer == nullptr) {
    return invalid("stop has {} strings, but there is no tokenizer to find them with",
                   request.sampling.stop.size());
  }
  if (const auto& id = request.grammar_begins_after;
      id && (!request.grammar || *id < 0 || *id >= limits.vocab_size)) {
    return invalid(
        "grammar_begins_after is {}, expected an id inside the vocabulary of {} and a "
        "grammar",
        *id, limits.vocab_size);
  }
  FATHOM_TRY(const int64_t max_len,
             resolve_max_len(std::ssize(request.prompt_ids), request.sampling, limits));

  auto active = std::make_unique<ActiveRequest>();
  active->request = std::move(request);
  active->sink = std::move(sink);
  const int n = active->request.sampling.n;
  for (int index = 0; index < n; ++index) {
    active->sequences.push_back(make_sequence(*active, index, max_len, limits, seed));
  }
  active->unfinished = n;
  return active;
}

}  // namespace fathom
