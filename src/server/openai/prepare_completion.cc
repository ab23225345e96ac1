// Prepares texts and token ids: completions and generate.
#include "server/openai/completion_reply.h"
#include "server/openai/generate_reply.h"
#include "server/openai/generation.h"
#include "server/openai/prompt_encoding.h"

namespace fathom {
namespace {

// Encodes all prompts of a list and checks each against the context.
ApiResult<std::vector<EncodedPrompt>> encode_all(const ServedModel& served, PromptList list,
                                                 const std::string& suffix, bool add_bos,
                                                 const SamplingParams& params,
                                                 const std::string& param) {
  if (!list.ids.empty() && !suffix.empty()) {
    return bad_field("suffix", "suffix needs a {} that is text, not token ids", param);
  }
  if (!list.problem.empty()) return bad_field(param, "{} {}", param, list.problem);
  std::vector<EncodedPrompt> prompts;
  const auto where = [&](size_t i) {
    return list.is_list ? fmt::format("{}[{}]", param, i) : param;
  };
  for (size_t i = 0; i < list.texts.size(); ++i) {
    FATHOM_TRY(EncodedPrompt prompt,
               suffix.empty() ? encode_text(served, list.texts[i], add_bos, where(i))
                              : encode_infill(served, list.texts[i], suffix, add_bos, where(i)));
    FATHOM_RETURN_IF_ERROR(check_length(served, std::ssize(prompt.ids), params, where(i)));
    prompts.push_back(std::move(prompt));
  }
  for (size_t i = 0; i < list.ids.size(); ++i) {
    FATHOM_TRY(EncodedPrompt prompt, take_ids(served, std::move(list.ids[i]), where(i)));
    FATHOM_RETURN_IF_ERROR(check_length(served, std::ssize(prompt.ids), params, where(i)));
    prompts.push_back(std::move(prompt));
  }
  return prompts;
}

// `default_tokens`: max_tokens if the request has none. Raised to its min_tokens and cut to what
// the context has left.
Generation generation_of(const ReplySpec& spec, const SamplingParams& params,
                         int64_t default_tokens, const SamplingFields& sampling) {
  Generation generation;
  generation.cache_salt = sampling.cache_salt;
  generation.priority = sampling.priority;
  generation.speculation = sampling.speculation;
  for (size_t i = 0; i < spec.prompts.size(); ++i) {
    Request request;
    request.id = spec.identity.make_id("req-", i);
    request.prompt_ids = spec.prompts[i].ids;
    request.sampling = params;
    if (!params.max_tokens) {
      const int64_t room = spec.served->max_model_len - std::ssize(request.prompt_ids);
      request.sampling.max_tokens = std::min(std::max(default_tokens, params.min_tokens), room);
    }
    generation.requests.push_back(std::move(request));
  }
  return generation;
}

void set_grammar(std::optional<WantedGrammar> wanted, Generation& generation) {
  if (!wanted) return;
  generation.grammar = std::move(wanted->spec);
  generation.grammar_param = std::move(wanted->param);
}

ApiResult<std::optional<WantedGrammar>> grammar_of(const GenerateSampling& sampling) {
  using Kind = GrammarSpec::Kind;
  std::vector<WantedGrammar> wanted;
  if (!sampling.json_schema.empty()) {
    FATHOM_TRY(auto schema, wanted_schema("sampling_params.json_schema",
                                          json::value(json::string(sampling.json_schema))));
    wanted.push_back(std::move(schema));
  }
  if (!sampling.regex.empty()) {
    wanted.push_back({"sampling_params.regex", {Kind::kRegex, sampling.regex}});
  }
  if (!sampling.ebnf.empty()) {
    wanted.push_back({"sampling_params.ebnf", {Kind::kEbnf, sampling.ebnf}});
  }
  return only_one(std::move(wanted));
}

ApiResult<> check_together(const CompletionRequest& request) {
  if (request.best_of && *request.best_of != request.reply.n) {
    return tl::unexpected(
        ApiError(400,
                 fmt::format("best_of is {}, only the number of choices, {}, is supported",
                             *request.best_of, request.reply.n),
                 "best_of", "unsupported_parameter"));
  }
  if (request.reply.stream && request.reply.prompt_logprobs) {
    return bad_field("prompt_logprobs", "prompt_logprobs is not available when stream is true");
  }
  if (request.reply.stream && request.echo && request.logprobs) {
    return bad_field("echo", "echo with logprobs is not available when stream is true");
  }
  return {};
}

// Decodes prompts given as ids for echo.
void add_echo_texts(const ServedModel& served, std::vector<EncodedPrompt>& prompts) {
  for (EncodedPrompt& prompt : prompts) {
    if (prompt.text.empty()) prompt.text = served.tokenizer->decode(prompt.ids);
  }
}

}  // namespace

ApiResult<Generation> prepare_completion(CompletionRequest request, const ServedModel& served,
                                         const ReplyIdentity& identity) {
  FATHOM_RETURN_IF_ERROR(check_together(request));
  SamplingParams params = request.sampling.params(served);
  params.max_tokens = request.max_tokens;
  if (request.max_tokens == 0) params.max_tokens = 1;
  params.stop = request.reply.stop.list;
  params.n = static_cast<int>(request.reply.n);
  FATHOM_TRY(const Handoff handoff, handoff_of(request.reply.transfer, served, request.max_tokens,
                                               request.reply.stream, request.prompt.size()));
  apply_handoff(handoff, params);
  params.logprobs = static_cast<int>(request.logprobs.value_or(-1));
  params.prompt_logprobs = static_cast<int>(request.reply.prompt_logprobs.value_or(-1));
  if (request.echo && request.logprobs) {
    params.prompt_logprobs = std::max(params.prompt_logprobs, params.logprobs);
  }
  FATHOM_RETURN_IF_ERROR(check_sampling(served, params));
  FATHOM_TRY(std::optional<WantedGrammar> grammar, grammar_of(request.structured));

  ReplySpec spec;
  FATHOM_TRY(spec.prompts, encode_all(served, std::move(request.prompt), request.suffix,
                                      request.add_special_tokens, params, "prompt"));
  spec.served = &served;
  spec.identity = identity;
  spec.model = request.reply.model.empty() ? served.names.front() : request.reply.model;
  spec.n = params.n;
  spec.stream = request.reply.stream;
  spec.include_usage = request.reply.stream_options.include_usage;
  spec.continuous_usage = spec.include_usage && request.reply.stream_options.continuous_usage_stats;
  spec.return_token_ids = request.reply.return_token_ids;
  spec.logprobs = request.logprobs.has_value();
  spec.prompt_logprobs = request.reply.prompt_logprobs.has_value();
  spec.echo = request.echo;
  spec.drop_output = request.max_tokens == 0;
  if (spec.echo) add_echo_texts(served, spec.prompts);
  if (handoff.is_reported) {
    spec.kv_transfer_params = kv_transfer_params_json(served, std::ssize(spec.prompts.front().ids));
  }
  Generation generation = generation_of(spec, params, kDefaultMaxTokens, request.sampling);
  set_handoff(handoff, generation);
  set_grammar(std::move(grammar), generation);
  if (spec.stream) {
    generation.writer = std::make_unique<CompletionStream>(std::move(spec));
  } else {
    generation.writer = std::make_unique<CompletionCollector>(std::move(spec));
  }
  return generation;
}

ApiResult<Generation> prepare_generate(GenerateRequest request, const ServedModel& served,
                                       const ReplyIdentity& identity) {
  if (!request.lora_path.is_null()) {
    return tl::unexpected(
        ApiError(400, "lora_path: LoRA adapters are not supported", "lora_path", "not_supported"));
  }
  if (request.text.has_value() == request.input_ids.has_value()) {
    return bad_field("text", "expected either text or input_ids, {}",
                     request.text ? "both are there" : "both are missing");
  }
  const GenerateSampling& sampling = request.sampling_params;
  SamplingParams params = sampling.sampling.params(served);
  params.max_tokens = sampling.max_new_tokens;
  params.min_tokens = std::max(sampling.min_new_tokens, params.min_tokens);
  params.stop = sampling.stop.list;
  params.n = static_cast<int>(sampling.n);
  const size_t num_prompts = request.text ? request.text->size() : request.input_ids->size();
  FATHOM_TRY(const Handoff handoff, handoff_of(request.transfer, served, sampling.max_new_tokens,
                                               request.stream, num_prompts));
  apply_handoff(handoff, params);
  if (request.return_logprob) {
    params.logprobs = static_cast<int>(request.top_logprobs_num);
    if (request.logprob_start_len >= 0) params.prompt_logprobs = params.logprobs;
  }
  auto valid = check_sampling(served, params);
  if (!valid) {
    if (valid.error().param) valid.error().param = "sampling_params." + *valid.error().param;
    return tl::unexpected(valid.error());
  }
  FATHOM_TRY(std::optional<WantedGrammar> grammar, grammar_of(sampling));

  const bool is_text = request.text.has_value();
  PromptList list = is_text ? std::move(*request.text) : std::move(*request.input_ids);
  GenerateOptions options{.is_list = list.is_list,
                          .logprob_start = request.logprob_start_len,
                          .top_logprobs = request.top_logprobs_num,
                          .rid = request.rid};
  ReplySpec spec;
  FATHOM_TRY(spec.prompts,
             encode_all(served, std::move(list), "", true, params, is_text ? "text" : "input_ids"));
  spec.served = &served;
  spec.identity = identity;
  spec.model = served.names.front();
  spec.n = params.n;
  spec.stream = request.stream;
  spec.logprobs = request.return_logprob;
  spec.prompt_logprobs = params.prompt_logprobs >= 0;
  Generation generation = generation_of(spec, params, kDefaultMaxNewTokens, sampling.sampling);
  set_handoff(handoff, generation);
  set_grammar(std::move(grammar), generation);
  generation.writer = std::make_unique<GenerateReply>(std::move(spec), std::move(options));
  return generation;
}

}  // namespace fathom
