#include "server/openai/chat_reply.h"

#include "server/openai/json_writer.h"
#include "server/openai/token_json.h"

namespace fathom {
namespace {

// "id":…,"object":…,"created":…,"model":…,"system_fingerprint":…
void write_envelope(JsonWriter& json, const std::string& id, std::string_view object,
                    const ReplySpec& spec) {
  json.field("id", id).field("object", object).field("created", spec.identity.created);
  json.field("model", spec.model).field("system_fingerprint", spec.served->fingerprint);
}

void append_string(std::string& out, std::string_view key, std::string_view text) {
  if (out.back() != '{') out += ',';
  out += '"';
  out += key;
  out += "\":\"";
  append_json_escaped(out, text);
  out += '"';
}

void write_call_deltas(const std::vector<ToolCallDelta>& calls, std::string& out) {
  JsonWriter json(out);
  json.key("tool_calls").open('[');
  for (const ToolCallDelta& call : calls) {
    json.open('{').field("index", call.index);
    if (!call.name.empty()) json.field("id", call.id).field("type", "function");
    json.key("function").open('{');
    if (!call.name.empty()) json.field("name", call.name);
    json.field("arguments", call.arguments).close('}').close('}');
  }
  json.close(']');
}

}  // namespace

ChatStream::ChatStream(ReplySpec spec) : ReplyWriter(std::move(spec)) {
  set_id(spec_.identity.make_id("chatcmpl-"));
  JsonWriter json(base_ = "data: ");
  json.open('{');
  write_envelope(json, id(), "chat.completion.chunk", spec_);
  head_ = base_ + ",\"choices\":[{\"index\":";
  for (size_t i = 0; i < static_cast<size_t>(spec_.num_choices()); ++i) {
    choices_.push_back({ChatChoice(spec_, i)});
  }
}

void ChatStream::write_first(size_t choice, std::string& out) const {
  out += head_;
  out += fmt::format("{}", choice);
  out += R"(,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}])";
  if (spec_.return_token_ids) {
    out += ",\"prompt_token_ids\":";
    append_ids(out, prompt_of(choice).ids);
  }
  close_chunk(choice, out);
}

// Writes the fields after the choices.
void ChatStream::close_chunk(size_t choice, std::string& out) const {
  if (spec_.continuous_usage) {
    ReplyUsage so_far;
    so_far.prompt_tokens = std::ssize(prompt_of(choice).ids);
    so_far.completion_tokens = completion_tokens(choice);
    out += ",\"usage\":" + so_far.to_json();
  } else if (spec_.include_usage) {
    out += ",\"usage\":null";
  }
  out += "}\n\n";
}

// Runs for every token of every stream, so text is appended and no tree is built.
void ChatStream::write_event(size_t choice, const Event& event, std::string& out) {
  Choice& state = choices_[choice];
  if (!state.started) {
    state.started = true;
    write_first(choice, out);
  }
  const StreamDelta delta = state.answer.advance(event);
  const bool shows_ids = (spec_.logprobs || spec_.return_token_ids) && !event.ids.empty();
  if (delta.empty() && !event.finish && !shows_ids) return;
  out += head_;
  out += fmt::format("{}", choice);
  out += ",\"delta\":{";
  if (!delta.reasoning.empty()) append_string(out, "reasoning_content", delta.reasoning);
  if (!delta.content.empty()) append_string(out, "content", delta.content);
  if (!delta.tool_calls.empty()) write_call_deltas(delta.tool_calls, out);
  if (spec_.logprobs && !event.logprobs.empty()) {
    out += "},\"logprobs\":{\"content\":[";
    append_chat_logprobs(out, *spec_.served->tokenizer, event.logprobs);
    out += "],\"refusal\":null}";
  } else {
    out += "},\"logprobs\":null";
  }
  if (event.finish) {
    out += ",\"finish_reason\":\"";
    out += state.answer.finish_reason(*event.finish);
    out += "\",";
    append_matched_stop(out, *spec_.served->tokenizer, event.matched_stop);
  } else {
    out += ",\"finish_reason\":null";
  }
  if (spec_.return_token_ids) {
    out += ",\"token_ids\":";
    append_ids(out, event.ids);
  }
  out += "}]";
  close_chunk(choice, out);
}

void ChatStream::write_end(std::string& out) {
  if (spec_.include_usage) {
    out += base_ + ",\"choices\":[],\"usage\":" + usage().to_json() + "}\n\n";
  }
  out += "data: [DONE]\n\n";
}

void ChatStream::write_failure(const ApiError& error, std::string& out) {
  out += "data: " + error.to_json() + "\n\n";
}

ChatCollector::ChatCollector(ReplySpec spec) : ReplyWriter(std::move(spec)) {
  set_id(spec_.identity.make_id("chatcmpl-"));
  for (size_t i = 0; i < static_cast<size_t>(spec_.num_choices()); ++i) {
    choices_.push_back({ChatChoice(spec_, i)});
  }
}

void ChatCollector::write_event(size_t choice, const Event& event, std::string&) {
  Choice& state = choices_[choice];
  state.parsed.add(state.answer.advance(event));
  if (spec_.logprobs) {
    append_chat_logprobs(state.logprobs, *spec_.served->tokenizer, event.logprobs);
  }
  if (spec_.return_token_ids) {
    state.ids.insert(state.ids.end(), event.ids.begin(), event.ids.end());
  }
  if (spec_.prompt_logprobs && !event.prompt_logprobs.empty()) {
    prompt_logprobs_.clear();
    append_prompt_logprobs(prompt_logprobs_, *spec_.served->tokenizer, event.prompt_logprobs);
  }
  if (!event.finish) return;
  state.finish = *event.finish;
  state.matched_stop = event.matched_stop;
}

void ChatCollector::write_choice(size_t index, std::string& out) const {
  const Choice& choice = choices_[index];
  const ParsedAnswer& parsed = choice.parsed;
  JsonWriter json(out);
  json.open('{').field("index", index).key("message").open('{').field("role", "assistant");
  if (parsed.content.empty() && !parsed.tool_calls.empty()) {
    json.field("content", nullptr);
  } else {
    json.field("content", parsed.content);
  }
  json.field("refusal", nullptr);
  if (!parsed.reasoning.empty()) json.field("reasoning_content", parsed.reasoning);
  if (!parsed.tool_calls.empty()) {
    json.key("tool_calls").open('[');
    for (const ToolCall& call : parsed.tool_calls) {
      json.open('{').field("id", call.id).field("type", "function").key("function").open('{');
      json.field("name", call.name).field("arguments", call.arguments).close('}').close('}');
    }
    json.close(']');
  }
  json.close('}').key("logprobs");
  if (spec_.logprobs) {
    json.open('{').raw_field("content", choice.logprobs + "]").field("refusal", nullptr).close('}');
  } else {
    json.value(nullptr);
  }
  json.field("finish_reason", choice.answer.finish_reason(choice.finish));
  out += ',';
  append_matched_stop(out, *spec_.served->tokenizer, choice.matched_stop);
  if (spec_.return_token_ids) {
    json.key("token_ids");
    append_ids(out, choice.ids);
  }
  json.close('}');
}

void ChatCollector::write_end(std::string& out) {
  JsonWriter json(out);
  json.open('{');
  write_envelope(json, id(), "chat.completion", spec_);
  json.key("choices").open('[');
  for (size_t i = 0; i < choices_.size(); ++i) write_choice(i, out);
  json.close(']').raw_field("usage", usage().to_json());
  if (spec_.prompt_logprobs) json.raw_field("prompt_logprobs", prompt_logprobs_);
  if (spec_.return_token_ids) {
    json.key("prompt_token_ids");
    append_ids(out, spec_.prompts.front().ids);
  }
  if (!spec_.kv_transfer_params.empty()) {
    json.raw_field("kv_transfer_params", spec_.kv_transfer_params);
  }
  json.close('}');
}

}  // namespace fathom
