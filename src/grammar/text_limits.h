// How large a regex or an EBNF grammar may be before anything tries to compile it. The limits keep
// XGrammar's work and memory bounded: it copies the body of a bounded repetition up to 128 times,
// and it recurses over nesting.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/status.h"
#include "engine/grammar_spec.h"

namespace fathom {

inline constexpr int kMaxGrammarDepth = 64;
inline constexpr int64_t kMaxGrammarRules = 2000;
// Single characters and classes, with the bodies of repetitions counted as often as they are
// copied. At this size compiling takes about a second with 128,000 tokens.
inline constexpr int64_t kMaxGrammarElements = 8192;

// `field` begins every error. Returns the number of elements.
Result<int64_t> check_regex(std::string_view regex, std::string_view field);
Result<> check_ebnf(std::string_view ebnf, std::string_view field);

// kMaxGrammarBytes, no NUL, well-formed UTF-8.
Result<> check_text(std::string_view text, std::string_view field);

}  // namespace fathom
