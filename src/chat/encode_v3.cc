// V2.5, V3, V3-0324 / R1-0528 and R1: role tokens, tool calls with a type word and fenced JSON.
//
// The published templates differ as described by V3Style, and keep state across turns that they
// never reset. The same state is kept here, so that the output equals that of transformers:
// - V3: from the second turn with calls on, a turn's first call is written like a later one: no
//   <｜Assistant｜>, no content, no opening of the block, a newline before it.
// - V3, R1: from the second group of results on, the opening of the outputs is missing.
// - R1, V2.5: calls are written only if content is null, and the block is closed after every call
//   but the first, so a single call is never closed.
#include <span>

#include "chat/encoders.h"
#include "chat/marker_scan.h"
#include "chat/prefill.h"
#include "chat/python_json.h"

namespace fathom {
namespace {

class V3Encoder {
 public:
  V3Encoder(const V3Style& style, PromptWriter& writer) : style_(style), writer_(writer) {}

  void write(const Message& message) {
    switch (message.role) {
      case Role::kSystem:
      case Role::kDeveloper:
        return;  // moved to the front
      case Role::kUser:
        return write_user(message);
      case Role::kAssistant:
        return message.tool_calls.empty() || (style_.r1_calls && message.content)
                   ? write_answer(message)
                   : write_calls(message);
      case Role::kTool:
        return write_result(message);
    }
  }

  // R1 writes white space around reasoning, which the client need not provide.
  void write_continued(const Message& message) {
    const bool after_results = in_results_;
    if (after_results) {
      writer_.fixed("<｜tool▁outputs▁end｜>");
    } else if (!style_.assistant_with_user) {
      writer_.fixed("<｜Assistant｜>");
    }
    Prefill prefill = read_prefill(message, style_.reasons);
    if (prefill.stage == Prefill::Stage::kNothing) {
      if (!after_results) writer_.fixed(style_.opening);
      return;
    }
    if (!style_.reasons) return writer_.text(prefill.content);
    prefill.reasoning.remove_prefix(leading_space(prefill.reasoning));
    if (prefill.stage == Prefill::Stage::kContent) {
      prefill.reasoning = trim_space(prefill.reasoning);
      prefill.content.remove_prefix(leading_space(prefill.content));
    }
    // R1 always opens reasoning; a message without reasoning closes it at once.
    const bool opens = !style_.opening.empty() && !after_results;
    if (opens) writer_.fixed(style_.opening);
    write_prefill(writer_, prefill, {"<think>\n", "\n</think>\n\n"}, opens);
  }

  void write_end(bool add_generation_prompt) {
    if (in_results_) return writer_.fixed("<｜tool▁outputs▁end｜>");
    if (!add_generation_prompt || after_user_) return;
    writer_.fixed("<｜Assistant｜>");
    writer_.fixed(style_.opening);
  }

 private:
  void write_user(const Message& message) {
    in_results_ = false;
    writer_.fixed("<｜User｜>");
    writer_.text(message.text());
    if (!style_.assistant_with_user) return;
    writer_.fixed("<｜Assistant｜>");
    after_user_ = true;
  }

  std::string_view cut_reasoning(std::string_view content) const {
    constexpr std::string_view kEnd = "</think>";
    const size_t end = style_.cuts_reasoning ? content.rfind(kEnd) : std::string_view::npos;
    return end == std::string_view::npos ? content : content.substr(end + kEnd.size());
  }

  void write_answer(const Message& message) {
    const std::string_view content = message.text();
    if (in_results_) {
      writer_.fixed("<｜tool▁outputs▁end｜>");
      // Only 0324 removes reasoning from a message that follows results.
      writer_.text(style_.assistant_with_user ? cut_reasoning(content) : content);
    } else {
      if (!style_.assistant_with_user) writer_.fixed("<｜Assistant｜>");
      writer_.text(cut_reasoning(content));
    }
    writer_.fixed(kEos);
    in_results_ = after_user_ = false;
  }

  void write_calls(const Message& message) {
    if (style_.assistant_with_user) {
      if (in_results_) writer_.fixed("<｜tool▁outputs▁end｜>");
      wrote_call_ = wrote_result_ = after_user_ = false;
    }
    in_results_ = false;
    for (const ToolCall& call : message.tool_calls) {
      const bool opens_block = !wrote_call_;
      if (opens_block) {
        if (!style_.assistant_with_user) writer_.fixed("<｜Assistant｜>");
        const std::string_view content = message.text();
        writer_.text(style_.assistant_with_user ? cut_reasoning(content) : content);
        writer_.fixed("<｜tool▁calls▁begin｜>");
        wrote_call_ = true;
      } else {
        writer_.fixed("\n");
      }
      writer_.fixed("<｜tool▁call▁begin｜>function<｜tool▁sep｜>");
      writer_.text(call.name);
      writer_.fixed("\n```json\n");
      writer_.text(call.arguments);
      writer_.fixed("\n```<｜tool▁call▁end｜>");
      if (style_.r1_calls && !opens_block) close_block();
    }
    if (!style_.r1_calls) close_block();
  }

  void close_block() {
    writer_.fixed("<｜tool▁calls▁end｜>");
    writer_.fixed(kEos);
  }

  void write_result(const Message& message) {
    in_results_ = true;
    after_user_ = false;
    if (!wrote_result_) {
      writer_.fixed("<｜tool▁outputs▁begin｜>");
      wrote_result_ = true;
    } else if (style_.newline_in_results) {
      writer_.fixed("\n");
    }
    writer_.fixed("<｜tool▁output▁begin｜>");
    writer_.text(message.text());
    writer_.fixed("<｜tool▁output▁end｜>");
  }

  const V3Style& style_;
  PromptWriter& writer_;
  bool in_results_ = false;
  bool after_user_ = false;  // only 0324: <｜Assistant｜> has been written
  bool wrote_call_ = false;
  bool wrote_result_ = false;
};

// The wording is this project's, the form of calls is the one used in training. DeepSeek published
// no tool instructions for these models; their templates expect the server to write them.
void write_tools(PromptWriter& writer, const std::vector<Tool>& tools) {
  writer.fixed("## Tools\n\nYou can call the functions below. Each line declares one as JSON:\n\n");
  for (const Tool& tool : tools) {
    writer.text(to_python_json(tool.function()));
    writer.fixed("\n");
  }
  writer.fixed(
      "\nTo call functions, write exactly this, with the arguments as a JSON object, and one "
      "<｜tool▁call▁begin｜>…<｜tool▁call▁end｜> for each call:\n"
      "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>FUNCTION_NAME\n"
      "```json\nARGUMENTS\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>");
}

std::string last_system(const std::vector<Message>& messages) {
  for (size_t i = messages.size(); i-- > 0;) {
    if (is_system(messages[i])) return std::string(messages[i].text());
  }
  return "";
}

}  // namespace

Result<Prompt> encode_v3(const Conversation& conversation, const V3Style& style) {
  PromptWriter writer;
  writer.fixed(kBos);
  const std::string system = style.joins_system ? joined_system(conversation.messages)
                                                : last_system(conversation.messages);
  writer.text(system);
  if (!conversation.tools.empty()) {
    if (!system.empty()) writer.fixed("\n\n");
    write_tools(writer, conversation.tools);
  }
  V3Encoder encoder(style, writer);
  std::span<const Message> history = conversation.messages;
  if (conversation.continue_final_message) history = history.first(history.size() - 1);
  for (const Message& message : history) encoder.write(message);
  if (conversation.continue_final_message) {
    encoder.write_continued(conversation.messages.back());
  } else {
    encoder.write_end(conversation.add_generation_prompt);
  }
  return std::move(writer).finish();
}

}  // namespace fathom
