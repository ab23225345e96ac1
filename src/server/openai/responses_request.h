// Body of POST /v1/responses. Nothing is stored: each request carries its complete input.
#pragma once

#include <optional>
#include <string>

#include "chat/message.h"
#include "server/openai/chat_request.h"

namespace fathom {

struct ReasoningOptions {
  std::string effort;

  static const ObjectSchema& schema();
};

struct TextOptions {
  ResponseFormat format;
  json::value echoed;  // the format as received, for the response

  static const ObjectSchema& schema();
};

struct ResponsesRequest {
  std::string model;
  json::value input, tools, metadata;
  std::optional<std::string> instructions;
  std::optional<int64_t> max_output_tokens;
  std::optional<ToolChoice> tool_choice;
  bool parallel_tool_calls = true;
  std::optional<ReasoningOptions> reasoning;
  TextOptions text;
  std::optional<int64_t> top_logprobs;
  std::vector<std::string> include;
  std::string previous_response_id;
  bool background = false;
  bool stream = false;
  SamplingFields sampling;

  static const ObjectSchema& schema();

  bool wants_logprobs() const;
  // Returns the conversation for the chat formats. Precondition: the request was checked.
  ApiResult<Conversation> conversation() const;
};

}  // namespace fathom
