#include "chat/prompt_ids.h"

namespace fathom {

Message plain_message(Role role, std::string text) {
  Message message;
  message.role = role;
  message.content = std::move(text);
  return message;
}

std::vector<int32_t> encode_prompt(const Tokenizer& tokenizer, const Prompt& prompt) {
  std::vector<int32_t> ids;
  for (const PromptSegment& segment : prompt.segments) {
    const std::vector<int32_t> part = segment.is_markup ? tokenizer.encode(segment.text)
                                                        : tokenizer.encode_ordinary(segment.text);
    ids.insert(ids.end(), part.begin(), part.end());
  }
  return ids;
}

}  // namespace fathom
