#include "server/openai/responses_reply.h"

#include "server/openai/json_writer.h"
#include "server/openai/token_json.h"

namespace fathom {
namespace {

// "key":"text", escaped.
std::string text_field(std::string_view key, std::string_view text) {
  std::string out;
  JsonWriter(out).field(key, text);
  return out;
}

std::string usage_json(const ReplyUsage& usage) {
  return fmt::format(
      R"({{"input_tokens":{},"input_tokens_details":{{"cached_tokens":{},"cache_write_tokens":0}},)"
      R"("output_tokens":{},"output_tokens_details":{{"reasoning_tokens":{}{}}},)"
      R"("total_tokens":{}}})",
      usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens, usage.reasoning_tokens,
      usage.accepted_field(), usage.prompt_tokens + usage.completion_tokens);
}

}  // namespace

ResponsesReply::ResponsesReply(ReplySpec spec, std::string echo)
    : ReplyWriter(std::move(spec)), echo_(std::move(echo)), answer_(spec_, 0) {
  set_id(spec_.identity.make_id("resp_"));
}

void ResponsesReply::emit(std::string_view type, const std::string& fields, std::string& out) {
  if (!spec_.stream) return;
  out += fmt::format("event: {}\ndata: {{\"type\":\"{}\",\"sequence_number\":{},{}}}\n\n", type,
                     type, sequence_++, fields);
}

std::string ResponsesReply::place() const {
  return fmt::format("\"item_id\":\"{}\",\"output_index\":{}", item_id_, num_items_ - 1);
}

std::string ResponsesReply::part() const {
  std::string out;
  JsonWriter json(out);
  json.open('{');
  if (current_ == Item::kReasoning) {
    json.field("type", "reasoning_text").field("text", text_);
  } else {
    json.field("type", "output_text").field("text", text_).key("annotations").raw("[]");
    json.raw_field("logprobs", fmt::format("[{}]", logprobs_));
  }
  json.close('}');
  return out;
}

std::string ResponsesReply::item(std::string_view status) const {
  std::string out;
  JsonWriter json(out);
  // A new item has no part yet.
  const bool is_new = status == "in_progress";
  json.open('{').field("id", item_id_);
  switch (current_) {
    case Item::kReasoning:
      json.field("type", "reasoning").key("summary").raw("[]");
      json.raw_field("content", is_new ? "[]" : fmt::format("[{}]", part()));
      break;
    case Item::kMessage:
      json.field("type", "message").field("role", "assistant");
      json.raw_field("content", is_new ? "[]" : fmt::format("[{}]", part()));
      break;
    case Item::kCall:
      json.field("type", "function_call").field("call_id", call_id_).field("name", call_name_);
      json.field("arguments", text_);
      break;
    case Item::kNone:
      break;
  }
  json.field("status", status).close('}');
  return out;
}

std::string ResponsesReply::response(State state, const ApiError* error) const {
  constexpr std::string_view kNames[] = {"in_progress", "completed", "incomplete", "failed"};
  std::string out;
  JsonWriter json(out);
  json.open('{').field("id", id()).field("object", "response");
  json.field("created_at", spec_.identity.created);
  json.field("status", kNames[static_cast<size_t>(state)]).field("background", false);
  json.key("error");
  if (error != nullptr) {
    // Only codes of the official schema.
    json.open('{').field("code", error->status == 429 ? "rate_limit_exceeded" : "server_error");
    json.field("message", error->message).close('}');
  } else {
    json.value(nullptr);
  }
  json.key("incomplete_details");
  if (state == State::kIncomplete) {
    json.open('{').field("reason", "max_output_tokens").close('}');
  } else {
    json.value(nullptr);
  }
  json.field("model", spec_.model).raw_field("output", fmt::format("[{}]", output_));
  json.field("previous_response_id", nullptr).field("store", false).raw(echo_).key("usage");
  if (state == State::kInProgress) {
    json.value(nullptr);
  } else {
    json.raw(usage_json(usage()));
  }
  json.close('}');
  return out;
}

void ResponsesReply::start(std::string& out) {
  started_ = true;
  const std::string begun = "\"response\":" + response(State::kInProgress, nullptr);
  emit("response.created", begun, out);
  emit("response.in_progress", begun, out);
}

void ResponsesReply::open(Item item_kind, const ToolCallDelta* call, std::string& out) {
  close(false, out);
  current_ = item_kind;
  constexpr std::string_view kPrefixes[] = {"", "rs_", "msg_", "fc_"};
  // Numbers disjoint from those of the calls' own ids.
  item_id_ = spec_.identity.make_id(kPrefixes[static_cast<size_t>(item_kind)],
                                    (uint64_t{1} << 62) + static_cast<uint64_t>(num_items_));
  ++num_items_;
  text_.clear();
  logprobs_.clear();
  if (call != nullptr) {
    call_id_ = call->id;
    call_name_ = call->name;
  }
  emit("response.output_item.added",
       fmt::format("\"output_index\":{},\"item\":{}", num_items_ - 1, item("in_progress")), out);
  if (item_kind != Item::kCall) {
    emit("response.content_part.added",
         fmt::format("{},\"content_index\":0,\"part\":{}", place(), part()), out);
  }
}

void ResponsesReply::add_text(std::string_view text, std::string& out) {
  text_ += text;
  const std::string delta = text_field("delta", text);
  if (current_ == Item::kCall) {
    emit("response.function_call_arguments.delta", fmt::format("{},{}", place(), delta), out);
  } else if (current_ == Item::kReasoning) {
    emit("response.reasoning_text.delta", fmt::format("{},\"content_index\":0,{}", place(), delta),
         out);
  } else {
    emit("response.output_text.delta",
         fmt::format("{},\"content_index\":0,{},\"logprobs\":[{}]", place(), delta,
                     pending_logprobs_),
         out);
    take_logprobs();
  }
}

// Moves pending log-probabilities to the message's list: with each text delta, and at the end for
// tokens without text.
void ResponsesReply::take_logprobs() {
  if (!logprobs_.empty() && !pending_logprobs_.empty()) logprobs_ += ',';
  logprobs_ += pending_logprobs_;
  pending_logprobs_.clear();
}

void ResponsesReply::close(bool incomplete, std::string& out) {
  if (current_ == Item::kNone) return;
  if (current_ == Item::kMessage) take_logprobs();
  const std::string text = text_field("text", text_);
  if (current_ == Item::kCall) {
    emit("response.function_call_arguments.done",
         fmt::format("{},{},{}", place(), text_field("name", call_name_),
                     text_field("arguments", text_)),
         out);
  } else {
    if (current_ == Item::kReasoning) {
      emit("response.reasoning_text.done", fmt::format("{},\"content_index\":0,{}", place(), text),
           out);
    } else {
      emit("response.output_text.done",
           fmt::format("{},\"content_index\":0,{},\"logprobs\":[{}]", place(), text, logprobs_),
           out);
    }
    emit("response.content_part.done",
         fmt::format("{},\"content_index\":0,\"part\":{}", place(), part()), out);
  }
  const std::string done = item(incomplete ? "incomplete" : "completed");
  emit("response.output_item.done",
       fmt::format("\"output_index\":{},\"item\":{}", num_items_ - 1, done), out);
  if (!output_.empty()) output_ += ',';
  output_ += done;
  current_ = Item::kNone;
}

void ResponsesReply::write_event(size_t, const Event& event, std::string& out) {
  if (!started_) start(out);
  if (spec_.logprobs && event.logprobs.size() > reasoning_ids()) {
    // Only tokens of the message have a field for log-probabilities.
    const auto first = event.logprobs.begin() + static_cast<ptrdiff_t>(reasoning_ids());
    append_chat_logprobs(pending_logprobs_, *spec_.served->tokenizer,
                         {first, event.logprobs.end()});
  }
  const StreamDelta delta = answer_.advance(event);
  if (!delta.reasoning.empty()) {
    if (current_ != Item::kReasoning) open(Item::kReasoning, nullptr, out);
    add_text(delta.reasoning, out);
  }
  if (!delta.content.empty()) {
    if (current_ != Item::kMessage) open(Item::kMessage, nullptr, out);
    add_text(delta.content, out);
  }
  for (const ToolCallDelta& call : delta.tool_calls) {
    if (!call.name.empty()) open(Item::kCall, &call, out);
    if (!call.arguments.empty()) add_text(call.arguments, out);
  }
  if (!event.finish) return;
  cut_ = event.finish == FinishReason::kLength;
  close(cut_, out);
}

void ResponsesReply::write_end(std::string& out) {
  const State state = cut_ ? State::kIncomplete : State::kCompleted;
  const std::string object = response(state, nullptr);
  if (!spec_.stream) {
    out += object;
    return;
  }
  emit(cut_ ? "response.incomplete" : "response.completed", "\"response\":" + object, out);
}

void ResponsesReply::write_failure(const ApiError& error, std::string& out) {
  if (!started_) start(out);
  close(true, out);
  emit("response.failed", "\"response\":" + response(State::kFailed, &error), out);
}

}  // namespace fathom
