#include "server/openai/messages_reply.h"

#include "server/openai/json_writer.h"

namespace fathom {
namespace {

// "stop_reason":…,"stop_sequence":…
void write_stop(JsonWriter& json, const ChatChoice& answer, const Event& end) {
  const auto* stop = std::get_if<std::string>(&end.matched_stop);
  const bool calls = answer.finish_reason(*end.finish) == "tool_calls";
  json.field("stop_reason", end.finish == FinishReason::kLength ? "max_tokens"
                            : calls                             ? "tool_use"
                            : stop != nullptr                   ? "stop_sequence"
                                                                : "end_turn");
  json.key("stop_sequence");
  if (stop != nullptr && !calls) {
    json.value(*stop);
  } else {
    json.value(nullptr);
  }
}

// Excludes cached tokens from the input tokens, as Anthropic does.
void write_usage(JsonWriter& json, const ReplyUsage& usage) {
  json.key("usage").open('{').field("input_tokens", usage.prompt_tokens - usage.cached_tokens);
  json.field("cache_creation_input_tokens", 0);
  json.field("cache_read_input_tokens", usage.cached_tokens);
  json.field("output_tokens", usage.completion_tokens);
  if (usage.draft_tokens > 0) json.field("accepted_tokens", usage.accepted_tokens);
  json.close('}');
}

// Returns the arguments if they are an object, which a tool's input must be. Other text is wrapped
// as {"INVALID_JSON": text}.
std::string input_json(const std::string& arguments) {
  const auto parsed = parse_json(arguments, "arguments");
  if (parsed && parsed->is_object()) return arguments;
  std::string out;
  JsonWriter(out).open('{').field("INVALID_JSON", arguments).close('}');
  return out;
}

}  // namespace

MessagesStream::MessagesStream(ReplySpec spec) : ReplyWriter(std::move(spec)), answer_(spec_, 0) {
  set_id(spec_.identity.make_id("msg_"));
}

void MessagesStream::start(std::string& out) {
  started_ = true;
  out += "event: message_start\ndata: ";
  JsonWriter json(out);
  json.open('{').field("type", "message_start").key("message").open('{').field("id", id());
  json.field("type", "message").field("role", "assistant").field("model", spec_.model);
  json.key("content").open('[').close(']').field("stop_reason", nullptr);
  json.field("stop_sequence", nullptr);
  ReplyUsage before;
  before.prompt_tokens = usage().prompt_tokens;
  write_usage(json, before);
  json.close('}').close('}');
  out += "\n\n";
}

void MessagesStream::open(Block block, const ToolCallDelta* call, std::string& out) {
  close(out);
  block_ = block;
  out += "event: content_block_start\ndata: ";
  JsonWriter json(out);
  json.open('{').field("type", "content_block_start").field("index", num_blocks_++);
  json.key("content_block").open('{');
  if (block == Block::kThinking) {
    json.field("type", "thinking").field("thinking", "").field("signature", "");
  } else if (block == Block::kText) {
    json.field("type", "text").field("text", "");
  } else {
    json.field("type", "tool_use").field("id", call->id).field("name", call->name);
    json.key("input").open('{').close('}');
  }
  json.close('}').close('}');
  out += "\n\n";
}

void MessagesStream::close(std::string& out) {
  if (block_ == Block::kNone) return;
  block_ = Block::kNone;
  out += fmt::format(
      "event: content_block_stop\ndata: {{\"type\":\"content_block_stop\","
      "\"index\":{}}}\n\n",
      num_blocks_ - 1);
}

void MessagesStream::write_delta(std::string_view type, std::string_view key, std::string_view text,
                                 std::string& out) const {
  out += fmt::format(
      "event: content_block_delta\ndata: {{\"type\":\"content_block_delta\","
      "\"index\":{},\"delta\":{{\"type\":\"{}\",\"{}\":\"",
      num_blocks_ - 1, type, key);
  append_json_escaped(out, text);
  out += "\"}}\n\n";
}

void MessagesStream::write_event(size_t, const Event& event, std::string& out) {
  if (!started_) start(out);
  const StreamDelta delta = answer_.advance(event);
  if (!delta.reasoning.empty()) {
    if (block_ != Block::kThinking) open(Block::kThinking, nullptr, out);
    write_delta("thinking_delta", "thinking", delta.reasoning, out);
  }
  if (!delta.content.empty()) {
    if (block_ != Block::kText) open(Block::kText, nullptr, out);
    write_delta("text_delta", "text", delta.content, out);
  }
  for (const ToolCallDelta& call : delta.tool_calls) {
    if (!call.name.empty()) open(Block::kToolUse, &call, out);
    if (!call.arguments.empty()) {
      write_delta("input_json_delta", "partial_json", call.arguments, out);
    }
  }
  if (!event.finish) return;
  close(out);
  out += "event: message_delta\ndata: ";
  JsonWriter json(out);
  json.open('{').field("type", "message_delta").key("delta").open('{');
  write_stop(json, answer_, event);
  json.close('}');
  write_usage(json, usage());
  json.close('}');
  out += "\n\n";
}

void MessagesStream::write_end(std::string& out) {
  out += "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n";
}

void MessagesStream::write_failure(const ApiError& error, std::string& out) {
  out += "event: error\ndata: " + error.to_json(ErrorShape::kAnthropic) + "\n\n";
}

MessagesCollector::MessagesCollector(ReplySpec spec)
    : ReplyWriter(std::move(spec)), answer_(spec_, 0) {
  set_id(spec_.identity.make_id("msg_"));
}

void MessagesCollector::write_event(size_t, const Event& event, std::string&) {
  parsed_.add(answer_.advance(event));
  if (event.finish) end_ = event;
}

void MessagesCollector::write_end(std::string& out) {
  JsonWriter json(out);
  json.open('{').field("id", id()).field("type", "message").field("role", "assistant");
  json.field("model", spec_.model).key("content").open('[');
  if (!parsed_.reasoning.empty()) {
    json.open('{').field("type", "thinking").field("thinking", parsed_.reasoning);
    json.field("signature", "").close('}');
  }
  if (!parsed_.content.empty()) {
    json.open('{').field("type", "text").field("text", parsed_.content).close('}');
  }
  for (const ToolCall& call : parsed_.tool_calls) {
    json.open('{').field("type", "tool_use").field("id", call.id).field("name", call.name);
    json.raw_field("input", input_json(call.arguments)).close('}');
  }
  json.close(']');
  write_stop(json, answer_, end_);
  write_usage(json, usage());
  json.close('}');
}

}  // namespace fathom
