// A vocabulary's markup: added tokens such as role markers, <think> and tool call markers.
//
// A grammar's character classes must not match them: output is text, and a marker inside a JSON
// string would act as markup of the chat format. A literal that spells a marker must match its
// token. Both hold because XGrammar sees each marker as one placeholder character beyond the end of
// Unicode, which no class contains, and because literals are rewritten to those placeholders.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"

namespace fathom {

class Tokenizer;

// Immutable; any thread.
class MarkupTokens {
 public:
  MarkupTokens() = default;  // no markup

  MarkupTokens(const Tokenizer& tokenizer, int64_t vocab_size);

  // The texts that XGrammar gets for the vocabulary's ids. Empty texts are never allowed: special
  // tokens (which are omitted from output text), and bytes that never occur in UTF-8.
  const std::vector<std::string>& vocabulary() const { return vocabulary_; }

  // Replaces markers in a literal text by their placeholders.
  std::string in_literal(std::string_view text) const;
  // The same within the quoted literals of an EBNF text.
  std::string in_ebnf(std::string_view ebnf) const;
  // The same in a regular expression, outside of character classes.
  std::string in_regex(std::string_view regex) const;
  // The same in a structural tag's texts; schemas in it are unchanged.
  json::value in_structural_tag(const json::value& tag) const;

 private:
  struct Marker {
    std::string text, placeholder;
  };
  // The longest marker that begins the text, or null.
  const Marker* marker_at(std::string_view text) const;

  std::vector<std::string> vocabulary_;
  std::vector<Marker> markers_;  // longest first
};

}  // namespace fathom
