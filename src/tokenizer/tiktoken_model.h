// Reads the tokenizer of Kimi K2 and Moonlight: tiktoken.model, a line a token with its bytes in
// base64 and its rank, which is its id. What else the tokenizer is stands in its published code: a
// pattern, and 256 ids for special tokens behind the ranks, which tokenizer_config.json names.
#pragma once

#include <string>
#include <string_view>

#include "base/status.h"
#include "tokenizer/tokenizer_json.h"

namespace fathom {

// The ranks' part: vocabulary and merges. `source` begins each error and names the line.
Result<Bpe> parse_tiktoken_ranks(std::string_view text, std::string_view source);

// The whole tokenizer. `config_text` is tokenizer_config.json's: tokenizer_class has to be
// TikTokenTokenizer, because other tokenizers with such a file have other patterns. Slots that
// added_tokens_decoder does not name are <|reserved_token_ID|>.
Result<TokenizerParts> parse_tiktoken(std::string_view ranks, std::string_view source,
                                      std::string_view config_text, std::string_view config_source);

}  // namespace fathom
