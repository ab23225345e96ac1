// POST /tokenize and /detokenize, in vLLM's form.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "server/openai/chat_request.h"

namespace fathom {

// A text, or a conversation as the chat format writes it.
struct TokenizeRequest {
  std::optional<std::string> prompt;
  ConversationFields conversation;
  std::optional<bool> add_special_tokens;  // true for a text
  bool return_token_strs = false;

  static const ObjectSchema& schema();
};

struct DetokenizeRequest {
  std::vector<int32_t> tokens;

  static const ObjectSchema& schema();
};

}  // namespace fathom
