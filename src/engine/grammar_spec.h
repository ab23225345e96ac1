// The constraint on a completion, as the request states it: a plain value passed from the request
// parsers to the grammar compiler (grammar/grammar_compiler.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace fathom {

// Limit of a schema, a regex, an EBNF grammar, a structural tag, or all choices together.
inline constexpr size_t kMaxGrammarBytes = 64 << 10;

struct GrammarSpec {
  enum class Kind : uint8_t {
    kJsonObject,     // any JSON object; no text
    kJsonSchema,     // text is a JSON schema
    kRegex,          // text is a regular expression that the whole answer matches
    kChoice,         // one of `choices` is the whole answer
    kEbnf,           // text is a grammar in XGrammar's (GBNF-like) notation
    kStructuralTag,  // text is an XGrammar structural tag: {"type":"structural_tag","format":…}
  };
  Kind kind = Kind::kJsonObject;
  std::string text = {};
  std::vector<std::string> choices = {};
  // The completion begins inside reasoning: the grammar applies after </think>.
  bool after_reasoning = false;

  bool operator==(const GrammarSpec&) const = default;
};

}  // namespace fathom
