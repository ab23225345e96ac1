// V3.1, V3.1-Terminus, V3.2-Exp, and the bundled model, which uses V3.1's form.
//
// An assistant turn after a user message begins with <｜Assistant｜></think> in either mode; one
// after tool results begins with nothing. A call is name, separator, raw JSON.
#include "chat/encoders.h"
#include "chat/prefill.h"
#include "chat/python_json.h"

namespace fathom {
namespace {

// Drops everything up to the first </think>.
std::string_view cut_reasoning(std::string_view content) {
  constexpr std::string_view kEnd = "</think>";
  const size_t end = content.find(kEnd);
  return end == std::string_view::npos ? content : content.substr(end + kEnd.size());
}

void write_calls(PromptWriter& writer, const std::vector<ToolCall>& calls) {
  writer.fixed("<｜tool▁calls▁begin｜>");
  for (const ToolCall& call : calls) {
    writer.fixed("<｜tool▁call▁begin｜>");
    writer.text(call.name);
    writer.fixed("<｜tool▁sep｜>");
    writer.text(call.arguments);
    writer.fixed("<｜tool▁call▁end｜>");
  }
  writer.fixed("<｜tool▁calls▁end｜>");
}

void write_result(PromptWriter& writer, const Message& message) {
  writer.fixed("<｜tool▁output▁begin｜>");
  writer.text(message.text());
  writer.fixed("<｜tool▁output▁end｜>");
}

// Writes the model card's tool block, up to the sentence in which the two models differ.
void write_tool_section(PromptWriter& writer, const std::vector<Tool>& tools) {
  writer.fixed("## Tools\nYou have access to the following tools:\n");
  for (const Tool& tool : tools) {
    writer.fixed("\n### ");
    writer.text(tool.name);
    writer.fixed("\nDescription: ");
    writer.text(tool.description);
    writer.fixed("\n\nParameters: ");
    writer.text(to_python_json(tool.parameters()));
    writer.fixed("\n");
  }
  writer.fixed(
      "\nIMPORTANT: ALWAYS adhere to this exact format for tool use:\n"
      "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>tool_call_name<｜tool▁sep｜>tool_call_arguments"
      "<｜tool▁call▁end｜>");
}

constexpr std::string_view kToolRules =
    "- `tool_call_name` must be an exact match to one of the available tools\n"
    "- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters "
    "Schema\n"
    "- For multiple tool calls, chain them directly without separators or spaces";

void write_generation_prompt(PromptWriter& writer, bool thinking) {
  writer.fixed("<｜Assistant｜>");
  writer.fixed(thinking ? "<think>" : "</think>");
}

// Writes the last message, to be continued. After tool results it begins with nothing.
void write_continued(PromptWriter& writer, const Conversation& conversation, bool after_user) {
  const Prefill prefill = read_prefill(conversation.messages.back(), /*reasons=*/true);
  bool is_open = false;
  if (after_user) {
    is_open = prefill.stage == Prefill::Stage::kNothing ? conversation.thinking
                                                        : !prefill.reasoning.empty();
    write_generation_prompt(writer, is_open);
  }
  write_prefill(writer, prefill, {"<think>", "</think>"}, is_open);
}

bool is_continued(const Conversation& conversation, const Message& message) {
  return conversation.continue_final_message && &message == &conversation.messages.back();
}

}  // namespace

Result<Prompt> encode_v31(const Conversation& conversation) {
  PromptWriter writer;
  writer.fixed(kBos);
  writer.text(joined_system(conversation.messages));
  if (!conversation.tools.empty()) {
    writer.fixed("\n\n");  // the model card has it after an empty system text too
    write_tool_section(writer, conversation.tools);
    writer.fixed("{{additional_tool_calls}}<｜tool▁calls▁end｜>\n\nWhere:\n\n");
    writer.fixed(kToolRules);
    writer.fixed("\n");
  }
  bool after_user = false;
  bool after_result = false;
  for (const Message& message : conversation.messages) {
    if (is_continued(conversation, message)) {
      write_continued(writer, conversation, after_user);
      return std::move(writer).finish();
    }
    switch (message.role) {
      case Role::kSystem:
      case Role::kDeveloper:
        continue;
      case Role::kUser:
        writer.fixed("<｜User｜>");
        writer.text(message.text());
        break;
      case Role::kAssistant: {
        const bool calls = !message.tool_calls.empty();
        const bool continues = !calls && message.prefix && conversation.thinking;
        if (after_user) write_generation_prompt(writer, continues);
        const std::string_view content = message.text();
        // The template removes reasoning only from plain messages that follow a user message.
        writer.text(calls || after_result ? content : cut_reasoning(content));
        if (calls) write_calls(writer, message.tool_calls);
        writer.fixed(kEos);
        break;
      }
      case Role::kTool:
        write_result(writer, message);
        break;
    }
    after_user = message.role == Role::kUser;
    after_result = message.role == Role::kTool;
  }
  if (conversation.add_generation_prompt && after_user) {
    write_generation_prompt(writer, conversation.thinking);
  }
  return std::move(writer).finish();
}

Result<Prompt> encode_fathom_tiny(const Conversation& conversation) {
  PromptWriter writer;
  writer.fixed(kBos);
  const std::string system = joined_system(conversation.messages);
  writer.text(system);
  if (!conversation.tools.empty()) {
    if (!system.empty()) writer.fixed("\n\n");
    write_tool_section(writer, conversation.tools);
    writer.fixed("{additional_tool_calls}<｜tool▁calls▁end｜>\n\nWhere:\n");
    writer.fixed(kToolRules);
  }
  bool after_user = false;
  for (const Message& message : conversation.messages) {
    if (is_continued(conversation, message)) {
      write_continued(writer, conversation, after_user);
      return std::move(writer).finish();
    }
    if (is_system(message)) continue;
    if (message.role == Role::kUser) {
      writer.fixed("<｜User｜>");
      writer.text(message.text());
    } else if (message.role == Role::kTool) {
      write_result(writer, message);
    } else {
      if (after_user) write_generation_prompt(writer, false);
      const std::string_view content = message.text();
      writer.text(cut_reasoning(content));
      if (!message.tool_calls.empty()) write_calls(writer, message.tool_calls);
      writer.fixed(kEos);
    }
    after_user = message.role == Role::kUser;
  }
  if (conversation.add_generation_prompt && after_user) {
    write_generation_prompt(writer, conversation.thinking);
  }
  return std::move(writer).finish();
}

}  // namespace fathom
