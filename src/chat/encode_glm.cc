// GLM-4.7 and GLM-5: calls are tags with a key and a value for each argument. Reasoning stands in
// the prompt for turns after the last user message, and an empty mark of it for those before.
//
// The three generations differ in details only (GlmStyle). Where a template would print None for
// an answer without content, nothing is printed.
#include <algorithm>

#include "base/utf8.h"
#include "chat/encoders.h"
#include "chat/prefill.h"
#include "chat/python_json.h"
#include "chat/think_tags.h"

namespace fathom {
namespace {

// What Python's str.strip() removes.
bool is_python_space(uint32_t c) {
  return (c >= 9 && c <= 13) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

std::string_view stripped(std::string_view text) {
  size_t begin = 0, end = 0;  // of the first and behind the last other character
  bool any = false;
  for (size_t i = 0; i < text.size();) {
    const Utf8Char c = decode_utf8(text, i);
    if (!c.valid || !is_python_space(c.code_point)) {
      if (!any) begin = i;
      any = true;
      end = i + c.length;
    }
    i += c.length;
  }
  return any ? text.substr(begin, end - begin) : std::string_view();
}

std::string_view without_newlines_before(std::string_view text) {
  return text.substr(std::min(text.find_first_not_of('\n'), text.size()));
}

std::string_view without_newlines_behind(std::string_view text) {
  return text.substr(0, text.find_last_not_of('\n') + 1);
}

// An assistant message's two parts. Views into it.
struct Parts {
  std::optional<std::string_view> reasoning;
  std::string_view content;
};

// Reasoning is reasoning_content, or what stands in the content before a closing tag.
Parts parts_of(const Message& message, const GlmStyle& style) {
  Parts parts{{}, message.text()};
  if (!message.reasoning.empty()) {
    parts.reasoning = message.reasoning;
    return parts;
  }
  const size_t close = parts.content.find(kThinkClose);
  if (close == std::string_view::npos) return parts;
  std::string_view before = parts.content.substr(0, close);
  parts.content.remove_prefix(parts.content.rfind(kThinkClose) + kThinkClose.size());
  if (style.trims_reasoning) before = without_newlines_behind(before);
  if (const size_t open = before.rfind(kThinkOpen); open != std::string_view::npos) {
    before.remove_prefix(open + kThinkOpen.size());
  }
  parts.reasoning = style.trims_reasoning ? without_newlines_before(before) : before;
  if (style.trims_reasoning) parts.content = without_newlines_before(parts.content);
  return parts;
}

class GlmEncoder {
 public:
  GlmEncoder(PromptWriter& writer, const GlmStyle& style) : writer_(writer), style_(style) {}

  void write_tools(const std::vector<Tool>& tools) {
    writer_.fixed(
        "<|system|>\n# Tools\n\nYou may call one or more functions to assist with the user "
        "query.\n\nYou are provided with function signatures within <tools></tools> XML tags:\n"
        "<tools>\n");
    for (const Tool& tool : tools) {
      writer_.text(to_python_json(style_.bare_tools ? bare(tool) : tool.declaration));
      writer_.fixed("\n");
    }
    writer_.fixed(
        "</tools>\n\nFor each function call, output the function name and arguments within the "
        "following XML format:\n<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key>"
        "<arg_value>{arg-value-1}</arg_value><arg_key>{arg-key-2}</arg_key>"
        "<arg_value>{arg-value-2}</arg_value>...</tool_call>");
  }

  Result<> write_assistant(const Message& message, bool shows_reasoning, const std::string& where) {
    writer_.fixed("<|assistant|>");
    const Parts parts = parts_of(message, style_);
    std::string_view reasoning = parts.reasoning.value_or("");
    if (style_.trims_reasoning) reasoning = stripped(reasoning);
    const bool any = style_.trims_reasoning ? !parts.reasoning.value_or("").empty()
                                            : parts.reasoning.has_value();
    if (shows_reasoning && any) {
      writer_.fixed(kThinkOpen);
      writer_.text(reasoning);
      writer_.fixed(kThinkClose);
    } else {
      writer_.fixed(style_.no_reasoning);
    }
    writer_.text(stripped(parts.content));
    for (size_t i = 0; i < message.tool_calls.size(); ++i) {
      FATHOM_RETURN_IF_ERROR(
          write_call(message.tool_calls[i], fmt::format("{}.tool_calls[{}]", where, i)));
    }
    return {};
  }

  // Without text of the client: the generation prompt.
  void write_begun(const Prefill& prefill, bool thinking) {
    writer_.fixed("<|assistant|>");
    if (prefill.stage == Prefill::Stage::kNothing) {
      writer_.fixed(thinking ? kThinkOpen : style_.no_reasoning);
    } else if (prefill.reasoning.empty()) {
      writer_.fixed(style_.no_reasoning);
    }
    write_prefill(writer_, prefill, {kThinkOpen, kThinkClose});
  }

 private:
  // The function alone, without what only a server reads.
  static json::object bare(const Tool& tool) {
    json::object function;
    for (const auto& [key, value] : tool.function()) {
      if (key != "strict" && key != "defer_loading") function[key] = value;
    }
    return function;
  }

  Result<> write_call(const ToolCall& call, const std::string& where) {
    FATHOM_TRY(const auto arguments, parse_json(call.arguments, where + ".function.arguments"));
    if (!arguments.is_object()) {
      return invalid("{}.function.arguments is {}, expected a JSON object", where,
                     brief(arguments));
    }
    writer_.fixed("<tool_call>");
    writer_.text(call.name);
    for (const auto& [key, value] : arguments.get_object()) {
      writer_.fixed("<arg_key>");
      writer_.text(key);
      writer_.fixed("</arg_key><arg_value>");
      writer_.text(value.is_string() ? std::string(value.get_string()) : to_python_json(value));
      writer_.fixed("</arg_value>");
    }
    writer_.fixed("</tool_call>");
    return {};
  }

  PromptWriter& writer_;
  const GlmStyle& style_;
};

}  // namespace

Result<Prompt> encode_glm(const Conversation& conversation, const GlmStyle& style) {
  PromptWriter writer;
  GlmEncoder encoder(writer, style);
  writer.fixed("[gMASK]<sop>");
  if (style.names_effort && conversation.thinking) {
    writer.fixed("<|system|>Reasoning Effort: Max");
  }
  if (!conversation.tools.empty()) encoder.write_tools(conversation.tools);
  const std::vector<Message>& messages = conversation.messages;
  const size_t num_whole = messages.size() - (conversation.continue_final_message ? 1 : 0);
  size_t after_user = 0;  // one past the last user message
  for (size_t i = 0; i < messages.size(); ++i) {
    if (messages[i].role == Role::kUser) after_user = i + 1;
  }
  for (size_t i = 0; i < num_whole; ++i) {
    const Message& message = messages[i];
    switch (message.role) {
      case Role::kSystem:
      case Role::kDeveloper:
        writer.fixed("<|system|>");
        writer.text(message.text());
        break;
      case Role::kUser:
        writer.fixed("<|user|>");
        writer.text(message.text());
        break;
      case Role::kTool:
        if (i == 0 || messages[i - 1].role != Role::kTool) writer.fixed("<|observation|>");
        writer.fixed("<tool_response>");
        writer.text(message.text());
        writer.fixed("</tool_response>");
        break;
      case Role::kAssistant:
        FATHOM_RETURN_IF_ERROR(
            encoder.write_assistant(message, i >= after_user, fmt::format("messages[{}]", i)));
        break;
    }
  }
  if (conversation.continue_final_message) {
    encoder.write_begun(read_prefill(messages.back(), true), conversation.thinking);
  } else if (conversation.add_generation_prompt) {
    encoder.write_begun({}, conversation.thinking);
  }
  return std::move(writer).finish();
}

}  // namespace fathom
