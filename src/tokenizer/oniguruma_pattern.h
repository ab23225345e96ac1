// Patterns of tokenizer.json are written for Oniguruma in its Ruby syntax (what Hugging Face's
// `tokenizers` compiles them with). This rewrites one for PCRE2 so that it means the same, or says
// which construct it cannot carry over: a pattern never silently means something else.
#pragma once

#include <string>
#include <string_view>

#include "base/status.h"

namespace fathom {

// The result is for PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE (in Ruby's syntax ^ and $ are always
// those of lines). Errors are a sentence's end: "uses \w, which …".
Result<std::string> oniguruma_to_pcre2(std::string_view pattern);

}  // namespace fathom
