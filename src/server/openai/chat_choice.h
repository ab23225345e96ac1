// One choice of a chat's answer on its way from text to reasoning, content and tool calls. What the
// chat, messages and responses writers share.
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

  // What an event adds; all that was held back with its last.
  StreamDelta advance(const Event& event);

  bool saw_tool_calls() const { return parser_.saw_tool_calls(); }
  // "stop", "length" or "tool_calls".
  std::string_view finish_reason(FinishReason reason) const;

 private:
  // Names calls whose format has no ids, and drops those that were not allowed.
  void adjust_calls(StreamDelta& delta) const;

  const ReplySpec& spec_;
  const size_t choice_;
  StreamParser parser_;
};

}  // namespace fathom
