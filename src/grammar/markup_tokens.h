// A vocabulary's markup: added tokens such as role markers, <think> and the markers of tool calls.
//
// A grammar's character classes must not take them, because an answer is text and a marker inside
// a JSON string would speak for the chat format; a literal that spells a marker takes its token.
// Both hold because XGrammar sees each marker as one placeholder character beyond Unicode's end,
// which no class reaches, and because literals are rewritten to those placeholders.
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

  // The texts that XGrammar gets for the vocabulary's ids. Empty, which it never allows: special
  // tokens (they are left out of an answer's text), and bytes that no UTF-8 has.
  const std::vector<std::string>& vocabulary() const { return vocabulary_; }

  // Markers in a text that is meant literally become their placeholders.
  std::string in_literal(std::string_view text) const;
  // The same within the quoted literals of an EBNF text.
  std::string in_ebnf(std::string_view ebnf) const;
  // The same in a regular expression, outside of classes.
  std::string in_regex(std::string_view regex) const;
  // The same in a structural tag's texts; schemas in it stay as they are.
  json::value in_structural_tag(const json::value& tag) const;

 private:
  struct Marker {
    std::string text, placeholder;
  };
  const Marker* marker_at(std::string_view text) const;  // the longest; null: none begins there

  std::vector<std::string> vocabulary_;
  std::vector<Marker> markers_;  // longer ones first
};

}  // namespace fathom
