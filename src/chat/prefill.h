// Prefill of the completion: the last message is its beginning, which the model continues.
#pragma once

#include <string_view>

#include "base/status.h"
#include "chat/format.h"
#include "chat/message.h"
#include "chat/prompt.h"

namespace fathom {

// The part of the completion that the client provides. Views into the message.
struct Prefill {
  enum class Stage {
    kNothing,    // no text: the completion begins as without a prefill
    kReasoning,  // reasoning is continued
    kContent,    // content is continued; reasoning, if any, is closed
  };
  Stage stage = Stage::kNothing;
  std::string_view reasoning;
  std::string_view content;
};

// The think tags with which a format encloses reasoning.
struct ThinkTags {
  std::string_view open;
  std::string_view close;
};

// Whether the format has reasoning between think tags.
bool format_reasons(ChatFormat format);

// Splits a message into reasoning and content. Reasoning is `reasoning_content`, or, for a format
// that reasons, the content's text between think tags (the opening tag may be missing). Content
// without reasoning stands for a completion without reasoning.
Prefill read_prefill(const Message& message, bool reasons);

// Checks that the last message can be continued: an assistant message without tool calls, and with
// reasoning only if the format has it. Errors name the message.
Result<> check_prefill(const Conversation& conversation, ChatFormat format);

// Writes reasoning between its tags, then content, without an end token. Omits the opening tag if
// `is_open`, that is, if the prompt already ends with it.
void write_prefill(PromptWriter& writer, const Prefill& prefill, const ThinkTags& tags,
                   bool is_open = false);

}  // namespace fathom
