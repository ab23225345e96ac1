// Unicode general categories as regular-expression classes, in the Unicode version of the
// tokenizers with which published vocabularies were made.
//
// PCRE2 10.42 implements Unicode 14. Oniguruma, which Hugging Face's `tokenizers` 0.23.3 (the
// reference) uses for patterns, implements Unicode 16. Code points assigned in between are added
// here, so that a new script is split as it is there.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace fathom {

// The content of a PCRE2 class for the general category `name` ("L", "Nd"), or nothing if it is not
// supported. Supported are the single letters L M N P S Z and the subcategories of L and N (not Mn
// and Mc: U+1171E moved from one to the other).
std::optional<std::string> category_class(std::string_view name);

// The content of a class for White_Space, and for its complement. Oniguruma's \s; PCRE2's also
// contains U+180E.
std::string_view space_class();
std::string_view not_space_class();

// The characters that Rust's char::is_numeric accepts: category N of Unicode 17, which has two more
// blocks than Unicode 16.
std::string numeric_class();

}  // namespace fathom
