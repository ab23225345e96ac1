// A small tokenizer for tests. Its likely ids produce short texts with frequent stop strings,
// characters that span several tokens, and ill-formed bytes. Test code only.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "tokenizer/tokenizer.h"

namespace fathom {

// Ids 0 … 255 are bytes, the next ones have several letters; 299 is special, the end of sequence.
inline constexpr int32_t kFakeEos = 299;
std::shared_ptr<const Tokenizer> fake_tokenizer();

// Letters, words, bytes that form a character only together, and the end of sequence.
std::vector<int32_t> fake_likely_ids();

}  // namespace fathom
