// Reads tokenizer.json and tokenizer_config.json into the tokenizer's parts. Each field that
// affects ids is supported or refused by name; none is ignored.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "tokenizer/bpe.h"
#include "tokenizer/pre_tokenizer.h"

namespace fathom {

struct AddedToken {
  std::string content;
  int32_t id = -1;
  bool special = false;     // omitted when decoding with skip_special
  bool normalized = false;  // searched after tokens that are not normalized
};

struct TokenizerParts {
  Bpe bpe;
  PreTokenizer pre_tokenizer;
  std::vector<AddedToken> added;
  std::vector<Bpe::Entry> glyphless;  // vocabulary entries not written in byte glyphs
};

Result<TokenizerParts> parse_tokenizer_json(std::string_view text, std::string_view source);

struct TokenizerConfig {
  std::optional<std::string> bos_token, eos_token;
  std::optional<std::string> chat_template;
  bool add_bos = false;
};

Result<TokenizerConfig> parse_tokenizer_config(std::string_view text, std::string_view source);

}  // namespace fathom
