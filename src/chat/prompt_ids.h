// Converts prompts to token ids.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "chat/format.h"
#include "tokenizer/tokenizer.h"

namespace fathom {

Message plain_message(Role role, std::string text);

// Encodes a rendered prompt. Special tokens are recognized only in segments that the chat format
// wrote, not in text that users wrote.
std::vector<int32_t> encode_prompt(const Tokenizer& tokenizer, const Prompt& prompt);

}  // namespace fathom
