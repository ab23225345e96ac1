// V3.2, following DeepSeek's published encoder (code instead of a template): message by message,
// tool calls in DSML, reasoning kept from the last user message on.
//
// A user message always opens the assistant turn (<｜Assistant｜> and a think tag), so
// add_generation_prompt has no effect. The conversation's tools and response format are written
// into its first system or developer message, or into an empty system message at the front.
#include "chat/encoders.h"
#include "chat/prefill.h"
#include "chat/python_json.h"

namespace fathom {
namespace {

constexpr std::string_view kToolsHead =
    "## Tools\n\n"
    "You have access to a set of tools you can use to answer the user's question.\n"
    "You can invoke functions by writing a \"<｜DSML｜function_calls>\" block like the following "
    "as "
    "part of your reply to the user:\n"
    "<｜DSML｜function_calls>\n"
    "<｜DSML｜invoke name=\"$FUNCTION_NAME\">\n"
    "<｜DSML｜parameter name=\"$PARAMETER_NAME\" string=\"true|false\">$PARAMETER_VALUE"
    "</｜DSML｜parameter>\n"
    "...\n"
    "</｜DSML｜invoke>\n"
    "<｜DSML｜invoke name=\"$FUNCTION_NAME2\">\n"
    "...\n"
    "</｜DSML｜invoke>\n"
    "</｜DSML｜function_calls>\n\n"
    "String and scalar parameters should be specified as is without any escaping or quotes, while "
    "lists and objects should use JSON format. The \"string\" attribute should be set to \"true\" "
    "for string type parameters and \"false\" for other types (numbers, booleans, arrays, "
    "objects).\n\n"
    "If the thinking_mode is enabled, then after function results you should strongly consider "
    "outputting a thinking block. Here is an example:\n\n"
    "<｜DSML｜function_calls>\n"
    "...\n"
    "</｜DSML｜function_calls>\n\n"
    "<function_results>\n"
    "...\n"
    "</function_results>\n\n"
    "<think>...thinking about results</think>\n\n"
    "Here are the functions available in JSONSchema format:\n"
    "<functions>\n";

constexpr std::string_view kResponseFormat =
    "\n\n## Response Format:\n\n"
    "You MUST strictly adhere to the following schema to reply:\n";

class V32Encoder {
 public:
  V32Encoder(const std::vector<Message>& messages, bool thinking, bool continues)
      : messages_(messages), thinking_(thinking) {
    if (continues) prefill_ = read_prefill(messages.back(), /*reasons=*/true);
    for (size_t i = 0; i < messages.size(); ++i) {
      if (messages[i].role == Role::kUser || messages[i].role == Role::kDeveloper) {
        last_user_ = static_cast<ptrdiff_t>(i);
      }
    }
  }

  Result<Prompt> encode() && {
    writer_.fixed(kBos);
    for (size_t i = 0; i < messages_.size(); ++i) FATHOM_RETURN_IF_ERROR(write(i));
    return std::move(writer_).finish();
  }

 private:
  Result<> write(size_t index) {
    const Message& message = messages_[index];
    switch (message.role) {
      case Role::kSystem:
        writer_.text(message.text());
        write_declarations(message);
        return {};
      case Role::kDeveloper:
      case Role::kUser:
        write_user(index);
        return {};
      case Role::kAssistant:
        return write_assistant(index);
      case Role::kTool:
        return write_result(index);
    }
    return {};
  }

  void write_declarations(const Message& message) {
    if (!message.tools.empty()) {
      writer_.fixed("\n\n");
      writer_.fixed(kToolsHead);
      for (size_t i = 0; i < message.tools.size(); ++i) {
        if (i > 0) writer_.fixed("\n");
        writer_.text(to_python_json(message.tools[i].function()));
      }
      writer_.fixed("\n</functions>\n");
    }
    if (message.response_schema) {
      writer_.fixed(kResponseFormat);
      writer_.text(to_python_json(*message.response_schema));
    }
  }

  void write_user(size_t index) {
    const Message& message = messages_[index];
    writer_.fixed("<｜User｜>");
    if (message.role == Role::kDeveloper) {
      write_declarations(message);
      writer_.fixed("\n\n# The user's message is: ");
    }
    writer_.text(message.text());
    writer_.fixed("<｜Assistant｜>");
    open_answer(index, thinking_ && static_cast<ptrdiff_t>(index) == last_user_);
  }

  // Writes the think tag after message `index`. If the next message is a prefill with text, its
  // reasoning decides instead of `thinks`.
  void open_answer(size_t index, bool thinks) {
    const bool is_next = prefill_ && index + 2 == messages_.size();
    if (is_next && prefill_->stage != Prefill::Stage::kNothing) {
      thinks = !prefill_->reasoning.empty();
    }
    writer_.fixed(thinks ? "<think>" : "</think>");
    is_open_ = is_next && thinks;
  }

  Result<> write_assistant(size_t index) {
    const Message& message = messages_[index];
    if (prefill_ && index + 1 == messages_.size()) {
      write_prefill(writer_, *prefill_, {"<think>", "</think>"}, is_open_);
      return {};
    }
    if (thinking_ && static_cast<ptrdiff_t>(index) > last_user_) {
      if (message.reasoning.empty() && message.tool_calls.empty()) {
        return invalid(
            "messages[{}].reasoning_content is missing: in thinking mode an assistant message "
            "after "
            "the last user message has reasoning or tool calls",
            index);
      }
      writer_.text(message.reasoning);
      writer_.fixed("</think>");
    }
    writer_.text(message.text());
    if (!message.tool_calls.empty()) {
      writer_.fixed("\n\n<｜DSML｜function_calls>\n");
      for (size_t i = 0; i < message.tool_calls.size(); ++i) {
        FATHOM_RETURN_IF_ERROR(write_call(message.tool_calls[i],
                                          fmt::format("messages[{}].tool_calls[{}]", index, i)));
      }
      writer_.fixed("</｜DSML｜function_calls>");
    }
    writer_.fixed(kEos);
    return {};
  }

  Result<> write_call(const ToolCall& call, const std::string& where) {
    FATHOM_TRY(const auto arguments, parse_json(call.arguments, where + ".function.arguments"));
    if (!arguments.is_object()) {
      return invalid("{}.function.arguments is {}, expected a JSON object", where,
                     brief(arguments));
    }
    writer_.fixed("<｜DSML｜invoke name=\"");
    writer_.text(call.name);
    writer_.fixed("\">\n");
    std::string_view separator;
    for (const auto& [key, value] : arguments.get_object()) {
      writer_.fixed(separator);
      separator = "\n";
      writer_.fixed("<｜DSML｜parameter name=\"");
      writer_.text(key);
      writer_.fixed(value.is_string() ? "\" string=\"true\">" : "\" string=\"false\">");
      writer_.text(value.is_string() ? std::string(value.get_string()) : to_python_json(value));
      writer_.fixed("</｜DSML｜parameter>");
    }
    writer_.fixed("\n</｜DSML｜invoke>\n");
    return {};
  }

  // Results belong to the assistant message before their group. Their number is checked against its
  // calls.
  Result<> write_result(size_t index) {
    size_t group = index;
    while (group > 0 && messages_[group - 1].role == Role::kTool) --group;
    const size_t calls = group == 0 ? 0 : messages_[group - 1].tool_calls.size();
    const size_t order = index - group + 1;
    if (order > calls) {
      return invalid("messages[{}] is tool result {} of an assistant message that made {} calls",
                     index, order, calls);
    }
    if (order == 1) writer_.fixed("\n\n<function_results>");
    writer_.fixed("\n<result>");
    writer_.text(messages_[index].text());
    writer_.fixed("</result>");
    if (order < calls) return {};
    writer_.fixed("\n</function_results>\n\n");
    open_answer(index, thinking_ && static_cast<ptrdiff_t>(index) > last_user_);
    return {};
  }

  const std::vector<Message>& messages_;
  const bool thinking_;
  ptrdiff_t last_user_ = -1;
  std::optional<Prefill> prefill_;  // the last message, if it is to be continued
  bool is_open_ = false;            // the prompt ends with <think> before it
  PromptWriter writer_;
};

}  // namespace

Result<Prompt> encode_v32(const Conversation& conversation) {
  if (conversation.tools.empty() && !conversation.response_schema) {
    return V32Encoder(conversation.messages, conversation.thinking,
                      conversation.continue_final_message)
        .encode();
  }
  std::vector<Message> messages = conversation.messages;
  if (messages.empty() || !is_system(messages.front())) {
    Message system;
    system.role = Role::kSystem;
    messages.insert(messages.begin(), std::move(system));
  }
  Message& first = messages.front();
  first.tools.insert(first.tools.end(), conversation.tools.begin(), conversation.tools.end());
  if (conversation.response_schema) first.response_schema = conversation.response_schema;
  return V32Encoder(messages, conversation.thinking, conversation.continue_final_message).encode();
}

}  // namespace fathom
