// Token ids to text as they arrive. A character whose bytes are spread over several tokens is held
// back until it is whole, so that no piece of text ends inside a character; the pieces together are
// what Tokenizer::decode gives for all ids at once. One object a stream, used by one thread.
#pragma once

#include <cstdint>
#include <string>

#include "tokenizer/tokenizer.h"

namespace fathom {

class IncrementalDetokenizer {
 public:
  // The tokenizer must outlive this object.
  explicit IncrementalDetokenizer(const Tokenizer& tokenizer, bool skip_special = true);

  // The text that this token completes; may be empty.
  std::string push(int32_t id);

  // What is held back, as U+FFFD: nothing can complete it any more.
  std::string flush();

 private:
  const Tokenizer& tokenizer_;
  const bool skip_special_;
  std::string held_;  // the beginning of a character, at most 3 bytes between calls
};

}  // namespace fathom
