// Size limits of a regex or an EBNF grammar, checked before compilation. They bound XGrammar's work
// and memory: it copies the body of a bounded repetition up to 128 times, and it recurses into
// nested groups.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/status.h"
#include "engine/grammar_spec.h"

namespace fathom {

inline constexpr int kMaxGrammarDepth = 64;
inline constexpr int64_t kMaxGrammarRules = 2000;
// Single characters and classes; the bodies of repetitions count as often as they are copied. At
// this size compilation takes about a second with 128,000 tokens.
inline constexpr int64_t kMaxGrammarElements = 8192;

// `field` begins each error. Returns the number of elements.
Result<int64_t> check_regex(std::string_view regex, std::string_view field);
Result<> check_ebnf(std::string_view ebnf, std::string_view field);

// Checks for kMaxGrammarBytes, no NUL, well-formed UTF-8.
Result<> check_text(std::string_view text, std::string_view field);

}  // namespace fathom
