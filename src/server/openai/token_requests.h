// Bodies of POST /tokenize and /detokenize, in vLLM's form.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "server/openai/chat_request.h"

namespace fathom {

// A text, or a conversation that the chat format renders.
struct TokenizeRequest {
  std::optional<std::string> prompt;
  ConversationFields conversation;
  std::optional<bool> add_special_tokens;  // default for a text: true
  bool return_token_strs = false;

  static const ObjectSchema& schema();
};

struct DetokenizeRequest {
  std::vector<int32_t> tokens;

  static const ObjectSchema& schema();
};

}  // namespace fathom
