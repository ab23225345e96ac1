// From what was said to the ids that a model reads.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "chat/format.h"
#include "tokenizer/tokenizer.h"

namespace fathom {

Message plain_message(Role role, std::string text);

// The ids of a rendered prompt: special tokens where the chat format wrote them, ordinary text
// where a person wrote the same characters.
std::vector<int32_t> encode_prompt(const Tokenizer& tokenizer, const Prompt& prompt);

}  // namespace fathom
