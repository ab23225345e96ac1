// Unicode general categories as regular-expression classes, in the Unicode version of the
// tokenizers that published vocabularies were made with.
//
// PCRE2 10.42 knows Unicode 14; Oniguruma, which Hugging Face's `tokenizers` uses for patterns,
// knows Unicode 16 in its version 0.23.3 (our yardstick). Code points that were assigned in between
// are added here, so that a new script splits as it does there.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace fathom {

// What to write between the brackets of a PCRE2 class for the general category `name` ("L", "Nd").
// Nothing for a name that is not supported: the single letters L M N P S Z and the parts of L and N
// are (Mn and Mc are not: U+1171E moved from one to the other).
std::optional<std::string> category_class(std::string_view name);

// White_Space and its complement, between brackets. PCRE2's own \s has U+180E as well, Oniguruma's
// has not.
std::string_view space_class();
std::string_view not_space_class();

// What Rust's char::is_numeric accepts: category N of Unicode 17, two blocks more than above.
std::string numeric_class();

}  // namespace fathom
