// Splits one choice's text into reasoning, content and tool calls. Shared by the chat, messages and
// responses writers.
#pragma once

#include <string>
#include <string_view>

#include "chat/stream_parser.h"
#include "engine/request.h"
#include "server/openai/reply_writer.h"

namespace fathom {

class ChatChoice {
 public:
  ChatChoice(const ReplySpec& spec, size_t choice);

  // Returns what an event adds; the last event also flushes the text held back.
  StreamDelta advance(const Event& event);

  bool saw_tool_calls() const { return parser_.saw_tool_calls(); }
  // Returns "stop", "length" or "tool_calls".
  std::string_view finish_reason(FinishReason reason) const;

 private:
  // Adds ids to calls whose format has none, and drops calls that parallel_calls forbids.
  void adjust_calls(StreamDelta& delta) const;

  const ReplySpec& spec_;
  const size_t choice_;
  StreamParser parser_;
};

}  // namespace fathom
