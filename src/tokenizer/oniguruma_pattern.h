// Patterns of tokenizer.json are written for Oniguruma in its Ruby syntax (Hugging Face's
// `tokenizers` compiles them with it). This file rewrites a pattern for PCRE2 with the same
// meaning, or refuses it and names the construct: a pattern never silently changes its meaning.
#pragma once

#include <string>
#include <string_view>

#include "base/status.h"

namespace fathom {

// The result is for PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE (in Ruby's syntax ^ and $ always match
// at lines). Errors are the end of a sentence: "uses \w, which …".
Result<std::string> oniguruma_to_pcre2(std::string_view pattern);

}  // namespace fathom
