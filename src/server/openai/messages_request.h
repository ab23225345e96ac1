// Bodies of POST /v1/messages and /v1/messages/count_tokens, in Anthropic's form.
#pragma once

#include <optional>
#include <string>

#include "chat/message.h"
#include "server/openai/chat_request.h"

namespace fathom {

struct MessagesToolChoice {
  ToolChoice choice;
  bool parallel = true;
};
void read_value(const json::value& value, MessagesToolChoice& out);

struct MessagesRequest {
  std::string model;
  json::value messages, system, tools;
  MessagesToolChoice tool_choice;
  std::optional<int64_t> max_tokens;  // required by /v1/messages, absent in count_tokens
  StopStrings stop_sequences;
  bool stream = false;
  std::optional<Thinking> thinking;
  SamplingFields sampling;

  static const ObjectSchema& schema();        // /v1/messages
  static const ObjectSchema& count_schema();  // /v1/messages/count_tokens

  // Returns the conversation for the chat formats. Precondition: the request was checked.
  ApiResult<Conversation> conversation() const;
};

}  // namespace fathom
