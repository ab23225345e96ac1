// Answer prefill: the last message is the beginning of an answer that the model continues.
#pragma once

#include <string_view>

#include "base/status.h"
#include "chat/format.h"
#include "chat/message.h"
#include "chat/prompt.h"

namespace fathom {

// What the client gives of the answer. Views into the message.
struct Prefill {
  enum class Stage {
    kNothing,    // no text: the answer begins as without a prefill
    kReasoning,  // reasoning is continued
    kContent,    // content is continued, what there is of reasoning is closed
  };
  Stage stage = Stage::kNothing;
  std::string_view reasoning;
  std::string_view content;
};

// Think tags as a format writes them around reasoning.
struct ThinkTags {
  std::string_view open;
  std::string_view close;
};

// Whether the format writes reasoning between think tags.
bool format_reasons(ChatFormat format);

// Reasoning is `reasoning_content`, or text of the content between think tags (the opening tag may
// be missing), for a format that reasons. Content without reasoning is an answer that has none.
Prefill read_prefill(const Message& message, bool reasons);

// That the last message can be continued: an assistant's, without tool calls, with reasoning only
// where the format has it. Errors name the message.
Result<> check_prefill(const Conversation& conversation, ChatFormat format);

// Reasoning between its tags, then content, and no end token behind. Writes the opening tag unless
// `is_open` says that the prompt ends in it.
void write_prefill(PromptWriter& writer, const Prefill& prefill, const ThinkTags& tags,
                   bool is_open = false);

}  // namespace fathom
