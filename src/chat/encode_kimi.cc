// Kimi K2, K2-Thinking, K2.5 and Moonlight. Call ids are part of the format: functions.NAME:INDEX,
// counted over the whole conversation. Results are matched to calls by order. K2.5 writes ids as
// the client gives them; those without one are counted likewise.
//
// The thinking models keep reasoning after a certain plain assistant message and remove it before.
// In K2.5 that is the last such message. In K2-Thinking it is the last according to a comment in
// its template, but the public template finds the first, and this encoder follows its code.
#include <deque>

#include "chat/encoders.h"
#include "chat/kimi_declarations.h"
#include "chat/prefill.h"
#include "chat/python_json.h"

namespace fathom {
namespace {

constexpr std::string_view kDefaultSystem =
    "<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot AI."
    "<|im_end|>";

class KimiEncoder {
 public:
  explicit KimiEncoder(PromptWriter& writer, bool keeps_ids = false)
      : writer_(writer), keeps_ids_(keeps_ids) {}

  // `reasoning` is the text between an assistant turn's think tags; nullopt: no tags.
  void write(const Message& message, std::optional<std::string_view> reasoning) {
    write_head(message);
    if (message.role == Role::kAssistant && reasoning) {
      writer_.fixed("<think>");
      writer_.text(*reasoning);
      writer_.fixed("</think>");
    }
    if (message.role == Role::kTool) {
      writer_.fixed("## Return of ");
      writer_.text(next_result_id(message));
      writer_.fixed("\n");
    }
    writer_.text(message.text());
    if (!message.tool_calls.empty()) write_calls(message.tool_calls);
    writer_.fixed("<|im_end|>");
  }

  // `begin` is what the generation prompt has behind its head, for a message without text.
  void write_continued(const Message& message, bool thinking_model, std::string_view begin = "") {
    write_head(message);
    const Prefill prefill = read_prefill(message, thinking_model);
    if (prefill.stage == Prefill::Stage::kNothing) {
      writer_.fixed(begin);
      return;
    }
    if (thinking_model) writer_.fixed("<think>");
    write_prefill(writer_, prefill, {"<think>", "</think>"}, thinking_model);
  }

 private:
  void write_head(const Message& message) {
    writer_.fixed(message.role == Role::kUser        ? "<|im_user|>"
                  : message.role == Role::kAssistant ? "<|im_assistant|>"
                                                     : "<|im_system|>");
    writer_.text(message.name.empty() ? role_name(message.role) : message.name);
    writer_.fixed("<|im_middle|>");
  }

  void write_calls(const std::vector<ToolCall>& calls) {
    writer_.fixed("<|tool_calls_section_begin|>");
    for (const ToolCall& call : calls) {
      const bool keeps = keeps_ids_ && !call.id.empty();
      unanswered_.push_back(keeps ? call.id : fmt::format("functions.{}:{}", call.name, calls_));
      ++calls_;
      writer_.fixed("<|tool_call_begin|>");
      writer_.text(unanswered_.back());
      writer_.fixed("<|tool_call_argument_begin|>");
      writer_.text(call.arguments);
      writer_.fixed("<|tool_call_end|>");
    }
    writer_.fixed("<|tool_calls_section_end|>");
  }

  std::string next_result_id(const Message& message) {
    if (keeps_ids_ && !message.tool_call_id.empty()) {
      if (!unanswered_.empty()) unanswered_.pop_front();
      return message.tool_call_id;
    }
    if (unanswered_.empty()) {
      return fmt::format("functions.{}:{}", message.name.empty() ? "unknown" : message.name,
                         calls_);
    }
    std::string id = std::move(unanswered_.front());
    unanswered_.pop_front();
    return id;
  }

  PromptWriter& writer_;
  bool keeps_ids_;
  std::deque<std::string> unanswered_;  // ids of calls without results so far
  int calls_ = 0;
};

}  // namespace

Result<Prompt> encode_kimi(const Conversation& conversation, bool thinking_model) {
  PromptWriter writer;
  if (!conversation.tools.empty()) {
    json::array declarations;
    for (const Tool& tool : conversation.tools) declarations.push_back(tool.declaration);
    writer.fixed("<|im_system|>tool_declare<|im_middle|>");
    writer.text(to_python_json(declarations));
    writer.fixed("<|im_end|>");
  }
  const std::vector<Message>& messages = conversation.messages;
  if (messages.empty() || messages.front().role != Role::kSystem) {
    writer.fixed(kDefaultSystem);
    if (!thinking_model && !messages.empty()) writer.fixed("\n");
  }
  const size_t num_whole = messages.size() - (conversation.continue_final_message ? 1 : 0);
  size_t history_end = 0;  // one past the first plain assistant message
  for (size_t i = num_whole; i-- > 0;) {
    if (messages[i].role == Role::kAssistant && messages[i].tool_calls.empty()) history_end = i + 1;
  }
  KimiEncoder encoder(writer);
  for (size_t i = 0; i < num_whole; ++i) {
    std::optional<std::string_view> reasoning;
    if (thinking_model) reasoning = i < history_end ? std::string_view() : messages[i].reasoning;
    encoder.write(messages[i], reasoning);
  }
  if (conversation.continue_final_message) {
    encoder.write_continued(messages.back(), thinking_model);
  } else if (conversation.add_generation_prompt) {
    writer.fixed("<|im_assistant|>assistant<|im_middle|>");
  }
  return std::move(writer).finish();
}

// The same with types for tools, no default system message, and reasoning that the prompt opens.
Result<Prompt> encode_kimi_k25(const Conversation& conversation) {
  PromptWriter writer;
  if (!conversation.tools.empty()) {
    writer.fixed("<|im_system|>tool_declare<|im_middle|>");
    writer.text(kimi_declarations(conversation.tools));
    writer.fixed("<|im_end|>");
  }
  const std::vector<Message>& messages = conversation.messages;
  const size_t num_whole = messages.size() - (conversation.continue_final_message ? 1 : 0);
  size_t history_end = 0;  // one past the last plain assistant message
  for (size_t i = 0; i < num_whole; ++i) {
    if (messages[i].role == Role::kAssistant && messages[i].tool_calls.empty()) history_end = i + 1;
  }
  KimiEncoder encoder(writer, true);
  for (size_t i = 0; i < num_whole; ++i) {
    const bool reasons = conversation.thinking && i >= history_end;
    encoder.write(messages[i], reasons ? std::string_view(messages[i].reasoning) : "");
  }
  const std::string_view begin = conversation.thinking ? "<think>" : "<think></think>";
  if (conversation.continue_final_message) {
    encoder.write_continued(messages.back(), true, begin);
  } else if (conversation.add_generation_prompt) {
    writer.fixed("<|im_assistant|>assistant<|im_middle|>");
    writer.fixed(begin);
  }
  return std::move(writer).finish();
}

// The same tokens with another default, and no tools.
Result<Prompt> encode_moonlight(const Conversation& conversation) {
  if (!conversation.tools.empty()) {
    return invalid("tools: the moonlight chat format cannot declare tools");
  }
  PromptWriter writer;
  const std::vector<Message>& messages = conversation.messages;
  if (!messages.empty() && !is_system(messages.front())) {
    writer.fixed("<|im_system|>system<|im_middle|>You are a helpful assistant<|im_end|>");
  }
  KimiEncoder encoder(writer);
  for (size_t i = 0; i < messages.size(); ++i) {
    Message message = messages[i];
    if (message.role == Role::kTool || !message.tool_calls.empty()) {
      return invalid("messages[{}]: the moonlight chat format has no tool calls", i);
    }
    message.name.clear();  // the role is what is written
    if (is_system(message)) message.role = Role::kSystem;
    if (conversation.continue_final_message && i + 1 == messages.size()) {
      encoder.write_continued(message, false);
      return std::move(writer).finish();
    }
    encoder.write(message, std::nullopt);
  }
  if (conversation.add_generation_prompt) {
    writer.fixed("<|im_assistant|>assistant<|im_middle|>");
  }
  return std::move(writer).finish();
}

}  // namespace fathom
