// Streaming conversion of token ids to text. A character whose bytes are spread over several tokens
// is held back until it is complete, so no piece ends inside a character. The concatenated pieces
// equal Tokenizer::decode of all ids. One object per stream, used by one thread.
#pragma once

#include <cstdint>
#include <string>

#include "tokenizer/tokenizer.h"

namespace fathom {

class IncrementalDetokenizer {
 public:
  // The tokenizer must outlive this object.
  explicit IncrementalDetokenizer(const Tokenizer& tokenizer, bool skip_special = true);

  // Returns the text that this token completes; may be empty.
  std::string push(int32_t id);

  // Returns U+FFFD for bytes that are held back. Call at the end of the stream.
  std::string flush();

 private:
  const Tokenizer& tokenizer_;
  const bool skip_special_;
  std::string held_;  // the beginning of a character, at most 3 bytes between calls
};

}  // namespace fathom
