#include "server/openai/model_bodies.h"

#include <fmt/chrono.h>

#include "server/openai/json_writer.h"
#include "server/openai/messages_request.h"
#include "server/openai/prompt_encoding.h"
#include "server/openai/request_json.h"
#include "server/openai/token_json.h"
#include "server/openai/token_requests.h"

namespace fathom {
namespace {

void write_model(JsonWriter& json, const ServedModel& served, std::string_view name) {
  json.open('{').field("id", name).field("object", "model").field("created", served.created);
  json.field("owned_by", "fathom").field("root", served.names.front()).field("parent", nullptr);
  json.field("max_model_len", served.max_model_len).close('}');
}

// Writes Anthropic's form.
void write_model_info(JsonWriter& json, const ServedModel& served, std::string_view name) {
  const auto created = fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(served.created));
  json.open('{').field("type", "model").field("id", name).field("display_name", name);
  json.field("created_at", created).field("lifecycle", "active");
  json.field("max_input_tokens", served.max_model_len).close('}');
}

template <typename T>
ApiResult<T> read_body(std::string_view body, const ObjectSchema& schema,
                       const RequestLimits& limits) {
  FATHOM_TRY(const json::object object, parse_request_json(body));
  std::vector<std::string> unknown;
  FATHOM_RETURN_IF_ERROR(check_object(schema, object, limits, &unknown));
  T request;
  store_fields(schema, object, &request);
  return request;
}

ApiResult<Conversation> conversation_of(const ConversationFields& fields) {
  FATHOM_TRY(Conversation conversation, read_conversation(fields, true));
  const TemplateArguments& arguments = fields.chat_template_kwargs;
  conversation.thinking = arguments.thinking.value_or(arguments.enable_thinking.value_or(false));
  return conversation;
}

ApiResult<EncodedPrompt> encode(const TokenizeRequest& request, const ServedModel& served) {
  const bool has_messages = !request.conversation.messages.is_null();
  if (request.prompt.has_value() == has_messages) {
    return bad_field("prompt", "expected either prompt or messages, {}",
                     has_messages ? "both are there" : "both are missing");
  }
  if (!has_messages) {
    // Texts longer than the context are allowed here; the body's limit bounds them.
    EncodedPrompt prompt;
    const bool bos =
        request.add_special_tokens.value_or(true) && served.tokenizer->add_bos_by_default();
    prompt.ids = served.tokenizer->encode(*request.prompt, bos);
    return prompt;
  }
  FATHOM_TRY(const Conversation conversation, conversation_of(request.conversation));
  return encode_conversation(served, conversation, "messages");
}

}  // namespace

std::string models_body(const ServedModel& served, ErrorShape shape) {
  std::string out;
  JsonWriter json(out);
  if (shape == ErrorShape::kAnthropic) {
    json.open('{').key("data").open('[');
    for (const std::string& name : served.names) write_model_info(json, served, name);
    json.close(']').field("has_more", false).field("first_id", served.names.front());
    json.field("last_id", served.names.back()).close('}');
    return out;
  }
  json.open('{').field("object", "list").key("data").open('[');
  for (const std::string& name : served.names) write_model(json, served, name);
  json.close(']').close('}');
  return out;
}

ApiResult<std::string> model_body(const ServedModel& served, std::string_view name,
                                  ErrorShape shape) {
  if (!served.has_name(name)) {
    return tl::unexpected(
        ApiError(404,
                 fmt::format("the model {} is not served here, but {} is",
                             brief(json::value(json::string(name))),
                             brief(json::value(json::string(served.names.front())))),
                 "model", "model_not_found"));
  }
  std::string out;
  JsonWriter json(out);
  if (shape == ErrorShape::kAnthropic) {
    write_model_info(json, served, name);
  } else {
    write_model(json, served, name);
  }
  return out;
}

std::string version_body(const ServedModel& served) {
  std::string out;
  JsonWriter(out).open('{').field("version", served.version).close('}');
  return out;
}

std::string get_model_info_body(const ServedModel& served) {
  std::string out;
  JsonWriter json(out);
  json.open('{').field("model_path", served.path).field("tokenizer_path", served.path);
  json.field("is_generation", true).field("served_model_name", served.names.front());
  json.field("max_model_len", served.max_model_len).field("vocab_size", served.vocab_size);
  json.key("chat_format");
  if (served.chat_format) {
    json.value(chat_format_name(*served.chat_format));
  } else {
    json.value(nullptr);
  }
  json.close('}');
  return out;
}

std::string props_body(const ServedModel& served) {
  std::string out;
  JsonWriter json(out);
  json.open('{').key("default_generation_settings").open('{');
  json.field("n_ctx", served.max_model_len).key("params").open('{');
  json.field("temperature", served.temperature.value_or(1));
  json.field("top_p", served.top_p.value_or(1)).field("top_k", served.top_k.value_or(0));
  json.close('}').close('}').field("model_alias", served.names.front());
  json.field("model_path", served.path).field("build_info", "fathom " + served.version);
  json.close('}');
  return out;
}

std::string server_info_body(const ServedModel& served, const json::object& server) {
  std::string out;
  JsonWriter json(out);
  json.open('{').field("version", served.version).raw_field("model", get_model_info_body(served));
  for (const auto& [key, value] : server) {
    json.raw_field(std::string_view(key), json::serialize(value));
  }
  json.close('}');
  return out;
}

ApiResult<std::string> tokenize_body(std::string_view body, const ServedModel& served,
                                     const RequestLimits& limits) {
  FATHOM_TRY(const auto request,
             read_body<TokenizeRequest>(body, TokenizeRequest::schema(), limits));
  FATHOM_TRY(const EncodedPrompt prompt, encode(request, served));
  std::string out;
  JsonWriter json(out);
  json.open('{').field("count", prompt.ids.size()).field("max_model_len", served.max_model_len);
  json.key("tokens");
  append_ids(out, prompt.ids);
  json.key("token_strs");
  if (request.return_token_strs) {
    json.open('[');
    for (const int32_t id : prompt.ids) {
      if (out.back() != '[') out += ',';
      append_token_text(out, *served.tokenizer, id);
    }
    json.close(']');
  } else {
    json.value(nullptr);
  }
  json.close('}');
  return out;
}

ApiResult<std::string> apply_template_body(std::string_view body, const ServedModel& served,
                                           const RequestLimits& limits) {
  FATHOM_TRY(const auto fields,
             read_body<ConversationFields>(body, ConversationFields::schema(), limits));
  if (fields.messages.is_null()) return bad_field("messages", "messages is missing");
  FATHOM_TRY(const Conversation conversation, conversation_of(fields));
  FATHOM_TRY(const Prompt prompt, render_conversation(served, conversation, "messages"));
  std::string out;
  JsonWriter(out).open('{').field("prompt", prompt.text()).close('}');
  return out;
}

ApiResult<std::string> detokenize_body(std::string_view body, const ServedModel& served,
                                       const RequestLimits& limits) {
  FATHOM_TRY(const auto request,
             read_body<DetokenizeRequest>(body, DetokenizeRequest::schema(), limits));
  for (size_t i = 0; i < request.tokens.size(); ++i) {
    if (request.tokens[i] < served.vocab_size) continue;
    return bad_field(fmt::format("tokens[{}]", i), "tokens[{}] is {}, outside the vocabulary of {}",
                     i, request.tokens[i], served.vocab_size);
  }
  std::string out;
  JsonWriter(out).open('{').field("prompt", served.tokenizer->decode(request.tokens)).close('}');
  return out;
}

ApiResult<std::string> count_tokens_body(std::string_view body, const ServedModel& served,
                                         const RequestLimits& limits) {
  FATHOM_TRY(const auto request,
             read_body<MessagesRequest>(body, MessagesRequest::count_schema(), limits));
  FATHOM_TRY(const Conversation conversation, request.conversation());
  FATHOM_TRY(const EncodedPrompt prompt, encode_conversation(served, conversation, "messages"));
  std::string out;
  JsonWriter(out).open('{').field("input_tokens", prompt.ids.size()).close('}');
  return out;
}

}  // namespace fathom
