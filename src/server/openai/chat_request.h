// Body of POST /v1/chat/completions.
#pragma once

#include <optional>
#include <string>

#include "server/openai/sampling_fields.h"
#include "server/openai/schema.h"
#include "server/openai/structured_fields.h"

namespace fathom {

struct ToolChoice {
  enum class Mode { kAuto, kNone, kRequired, kNamed };
  Mode mode = Mode::kAuto;
  std::string name = {};  // with kNamed
};
void read_value(const json::value& value, ToolChoice& out);  // for chat and responses

// Accepts "thinking": true, and DeepSeek's and Anthropic's {"type": "enabled"}.
struct Thinking {
  bool enabled = false;
};
void read_value(const json::value& value, Thinking& out);
Type thinking_type();

Type reasoning_effort_type();
// Returns false for "none" and "minimal", which turn reasoning off, and true otherwise.
bool effort_thinks(const std::string& effort);

struct TemplateArguments {
  std::optional<bool> thinking, enable_thinking;

  static const ObjectSchema& schema();
};

// The conversation: fields that chat and tokenize share.
struct ConversationFields {
  json::value messages, tools;
  TemplateArguments chat_template_kwargs;
  // Default: true, unless the final message is continued.
  std::optional<bool> add_generation_prompt;
  bool continue_final_message = false;

  static const ObjectSchema& schema();  // `messages` is optional here
};
Type messages_type();

struct ChatRequest {
  ConversationFields conversation;
  std::optional<ToolChoice> tool_choice;
  bool parallel_tool_calls = true;
  std::optional<int64_t> max_tokens, max_completion_tokens;
  bool logprobs = false;
  std::optional<int64_t> top_logprobs;
  std::optional<Thinking> thinking;
  std::string reasoning_effort;
  json::value functions, function_call;  // OpenAI's predecessors of tools; refused
  json::value audio, modalities;         // refused, unless it asks for text only
  ReplyFields reply;
  SamplingFields sampling;
  StructuredFields structured;

  static const ObjectSchema& schema();
};

}  // namespace fathom
