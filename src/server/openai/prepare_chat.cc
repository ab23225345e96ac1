// Prepares conversations: chat, messages, responses.
#include <algorithm>
#include <tuple>

#include "server/openai/chat_reply.h"
#include "server/openai/generation.h"
#include "server/openai/json_writer.h"
#include "server/openai/messages_reply.h"
#include "server/openai/prompt_encoding.h"
#include "server/openai/responses_reply.h"
#include "server/openai/tool_grammar.h"

namespace fathom {
namespace {

// The parts of a request that the three endpoints share.
struct ConversationTask {
  Conversation conversation;
  ToolChoice tool_choice;
  bool parallel_calls = true;
  std::optional<WantedGrammar> grammar;
  SamplingParams params;
  const SamplingFields* sampling = nullptr;
  std::string param;  // field of the conversation
  std::string model;
};

ApiResult<> check_choice(const ToolChoice& choice, const std::vector<Tool>& tools) {
  const bool forced =
      choice.mode == ToolChoice::Mode::kRequired || choice.mode == ToolChoice::Mode::kNamed;
  if (!forced) return {};
  if (tools.empty()) {
    return bad_field("tool_choice", "tool_choice demands a call, but tools is missing or empty");
  }
  const bool known = std::any_of(tools.begin(), tools.end(),
                                 [&](const Tool& tool) { return tool.name == choice.name; });
  if (choice.mode == ToolChoice::Mode::kNamed && !known) {
    return bad_field("tool_choice", "tool_choice names the tool {}, which tools does not declare",
                     brief(json::value(json::string(choice.name))));
  }
  return {};
}

// Prepares everything but the writer. The caller adds its endpoint's fields to `spec`.
ApiResult<Generation> prepare_task(ConversationTask& task, const ServedModel& served,
                                   ReplySpec& spec) {
  FATHOM_RETURN_IF_ERROR(check_choice(task.tool_choice, task.conversation.tools));
  FATHOM_TRY(EncodedPrompt prompt, encode_conversation(served, task.conversation, task.param));
  FATHOM_RETURN_IF_ERROR(check_length(served, std::ssize(prompt.ids), task.params, task.param));
  FATHOM_RETURN_IF_ERROR(check_sampling(served, task.params));
  keep_markers(served, task.params);

  Generation generation;
  std::optional<GrammarSpec> of_text;
  if (task.grammar) of_text = task.grammar->spec;
  generation.grammar = tool_grammar(*served.chat_format, task.conversation.tools, task.tool_choice,
                                    task.parallel_calls, of_text);
  if (generation.grammar) {
    generation.grammar_param = generation.grammar == of_text ? task.grammar->param : "tools";
    FATHOM_RETURN_IF_ERROR(check_grammar_size(*generation.grammar, generation.grammar_param));
    generation.grammar->after_reasoning = prompt.opens_reasoning;
  }
  generation.cache_salt = task.sampling->cache_salt;
  generation.priority = task.sampling->priority;
  generation.speculation = task.sampling->speculation;

  spec.served = &served;
  spec.model = task.model.empty() ? served.names.front() : task.model;
  spec.expect_tools = !task.conversation.tools.empty();
  spec.tools = task.conversation.tools;
  spec.parallel_calls = task.parallel_calls;
  spec.n = task.params.n;
  Request request;
  request.id = spec.identity.make_id("req-");
  request.prompt_ids = prompt.ids;
  request.sampling = task.params;
  generation.requests.push_back(std::move(request));
  spec.prompts.push_back(std::move(prompt));
  return generation;
}

bool wants_thinking(const ChatRequest& request) {
  const TemplateArguments& arguments = request.conversation.chat_template_kwargs;
  if (arguments.thinking) return *arguments.thinking;
  if (arguments.enable_thinking) return *arguments.enable_thinking;
  if (request.thinking) return request.thinking->enabled;
  return !request.reasoning_effort.empty() && effort_thinks(request.reasoning_effort);
}

ApiResult<> check_reply_fields(const ReplyFields& reply) {
  if (reply.stream && reply.prompt_logprobs) {
    return bad_field("prompt_logprobs", "prompt_logprobs is not available when stream is true");
  }
  return {};
}

// Refuses OpenAI's predecessors of tools: their responses have a different shape.
ApiResult<> refuse_functions(const ChatRequest& request) {
  const std::tuple<const json::value*, const char*, const char*> fields[] = {
      {&request.functions, "functions", "tools"},
      {&request.function_call, "function_call", "tool_choice"}};
  for (const auto& [value, field, instead] : fields) {
    if (value->is_null()) continue;
    return tl::unexpected(ApiError(400, fmt::format("{} is not supported: use {}", field, instead),
                                   field, "unsupported_parameter"));
  }
  return {};
}

ApiResult<> refuse_audio(const ChatRequest& request) {
  const json::value text_only(json::array(1, "text"));
  const char* field = nullptr;
  if (!request.audio.is_null()) field = "audio";
  if (!request.modalities.is_null() && request.modalities != text_only) field = "modalities";
  if (field == nullptr) return {};
  return tl::unexpected(
      ApiError(400, fmt::format("{}: answers are text only", field), field, "not_supported"));
}

// Returns the response's fields that repeat the request.
std::string responses_echo(const ResponsesRequest& request, const SamplingParams& params) {
  std::string out;
  JsonWriter json(out);
  const auto tree = [&](std::string_view key, const json::value& value, std::string_view without) {
    json.raw_field(key, value.is_null() ? std::string(without) : json::serialize(value));
  };
  json.field("instructions", request.instructions);
  json.field("max_output_tokens", request.max_output_tokens);
  json.field("parallel_tool_calls", request.parallel_tool_calls);
  json.field("temperature", params.temperature).field("top_p", params.top_p);
  json.key("tool_choice");
  const ToolChoice choice = request.tool_choice.value_or(ToolChoice());
  constexpr std::string_view kWords[] = {"auto", "none", "required"};
  if (choice.mode == ToolChoice::Mode::kNamed) {
    json.open('{').field("type", "function").field("name", choice.name).close('}');
  } else {
    json.value(kWords[static_cast<size_t>(choice.mode)]);
  }
  tree("tools", request.tools, "[]");
  json.key("text").open('{');
  tree("format", request.text.echoed, R"({"type":"text"})");
  json.close('}').key("reasoning").open('{').key("effort");
  if (request.reasoning && !request.reasoning->effort.empty()) {
    json.value(request.reasoning->effort);
  } else {
    json.value(nullptr);
  }
  json.field("summary", nullptr).close('}').field("truncation", "disabled");
  tree("metadata", request.metadata, "{}");
  return out;
}

}  // namespace

ApiResult<Generation> prepare_chat(ChatRequest request, const ServedModel& served,
                                   const ReplyIdentity& identity) {
  FATHOM_RETURN_IF_ERROR(check_reply_fields(request.reply));
  FATHOM_RETURN_IF_ERROR(refuse_functions(request));
  FATHOM_RETURN_IF_ERROR(refuse_audio(request));
  if (request.top_logprobs && !request.logprobs) {
    return bad_field("top_logprobs", "top_logprobs is {}, which needs logprobs to be true",
                     *request.top_logprobs);
  }
  ConversationTask task;
  task.tool_choice = request.tool_choice.value_or(ToolChoice());
  task.parallel_calls = request.parallel_tool_calls;
  FATHOM_TRY(
      task.conversation,
      read_conversation(request.conversation, task.tool_choice.mode != ToolChoice::Mode::kNone));
  task.conversation.thinking = wants_thinking(request);
  if (request.structured.response_format.type == "json_schema") {
    task.conversation.response_schema = request.structured.response_format.schema;
  }
  FATHOM_TRY(task.grammar, grammar_of(request.structured));
  task.param = "messages";
  task.model = request.reply.model;
  task.sampling = &request.sampling;
  task.params = request.sampling.params(served);
  task.params.max_tokens =
      request.max_completion_tokens ? request.max_completion_tokens : request.max_tokens;
  task.params.stop = request.reply.stop.list;
  task.params.n = static_cast<int>(request.reply.n);
  FATHOM_TRY(const Handoff handoff, handoff_of(request.reply.transfer, served,
                                               task.params.max_tokens, request.reply.stream, 1));
  apply_handoff(handoff, task.params);
  if (request.logprobs) {
    task.params.logprobs = static_cast<int>(request.top_logprobs.value_or(0));
  }
  task.params.prompt_logprobs = static_cast<int>(request.reply.prompt_logprobs.value_or(-1));

  ReplySpec spec;
  spec.identity = identity;
  FATHOM_TRY(Generation generation, prepare_task(task, served, spec));
  spec.stream = request.reply.stream;
  spec.include_usage = request.reply.stream_options.include_usage;
  spec.continuous_usage = spec.include_usage && request.reply.stream_options.continuous_usage_stats;
  spec.return_token_ids = request.reply.return_token_ids;
  spec.logprobs = request.logprobs;
  spec.prompt_logprobs = request.reply.prompt_logprobs.has_value();
  set_handoff(handoff, generation);
  if (handoff.is_reported) {
    spec.kv_transfer_params = kv_transfer_params_json(served, std::ssize(spec.prompts.front().ids));
  }
  if (spec.stream) {
    generation.writer = std::make_unique<ChatStream>(std::move(spec));
  } else {
    generation.writer = std::make_unique<ChatCollector>(std::move(spec));
  }
  return generation;
}

ApiResult<Generation> prepare_messages(const MessagesRequest& request, const ServedModel& served,
                                       const ReplyIdentity& identity) {
  ConversationTask task;
  FATHOM_TRY(task.conversation, request.conversation());
  task.tool_choice = request.tool_choice.choice;
  task.parallel_calls = request.tool_choice.parallel;
  task.param = "messages";
  task.model = request.model;
  task.sampling = &request.sampling;
  task.params = request.sampling.params(served);
  task.params.max_tokens = request.max_tokens;
  task.params.stop = request.stop_sequences.list;

  ReplySpec spec;
  spec.identity = identity;
  FATHOM_TRY(Generation generation, prepare_task(task, served, spec));
  spec.stream = request.stream;
  if (spec.stream) {
    generation.writer = std::make_unique<MessagesStream>(std::move(spec));
  } else {
    generation.writer = std::make_unique<MessagesCollector>(std::move(spec));
  }
  return generation;
}

ApiResult<Generation> prepare_responses(const ResponsesRequest& request, const ServedModel& served,
                                        const ReplyIdentity& identity) {
  ConversationTask task;
  FATHOM_TRY(task.conversation, request.conversation());
  task.tool_choice = request.tool_choice.value_or(ToolChoice());
  task.parallel_calls = request.parallel_tool_calls;
  if (auto grammar = grammar_of(request.text.format)) {
    FATHOM_RETURN_IF_ERROR(check_grammar_size(*grammar, "text.format"));
    task.grammar = {"text.format", std::move(*grammar)};
  }
  task.param = "input";
  task.model = request.model;
  task.sampling = &request.sampling;
  task.params = request.sampling.params(served);
  task.params.max_tokens = request.max_output_tokens;
  if (request.wants_logprobs()) {
    task.params.logprobs = static_cast<int>(request.top_logprobs.value_or(0));
  }

  ReplySpec spec;
  spec.identity = identity;
  FATHOM_TRY(Generation generation, prepare_task(task, served, spec));
  spec.stream = request.stream;
  spec.logprobs = request.wants_logprobs();
  generation.writer =
      std::make_unique<ResponsesReply>(std::move(spec), responses_echo(request, task.params));
  return generation;
}

}  // namespace fathom
