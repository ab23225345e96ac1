// A small tokenizer for tests, whose likely ids make short texts in which stop strings, characters
// of several tokens and ill-formed bytes are frequent. Test code only.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "tokenizer/tokenizer.h"

namespace fathom {

// Bytes are ids 0 … 255, then some of several letters; 299 is special, the tests' end of sequence.
inline constexpr int32_t kFakeEos = 299;
std::shared_ptr<const Tokenizer> fake_tokenizer();

// Letters, words, bytes that only together make a character, and the end of sequence.
std::vector<int32_t> fake_likely_ids();

}  // namespace fathom
