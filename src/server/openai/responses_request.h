// POST /v1/responses: OpenAI's newer form. Nothing is stored: each request carries its whole input.
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
  json::value echoed;  // the format as it came, for the reply

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
  // The conversation as every chat format takes it. The request has been checked.
  ApiResult<Conversation> conversation() const;
};

}  // namespace fathom
