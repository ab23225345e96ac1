// Detects grammars that cannot be matched to their end.
#pragma once

#include <optional>
#include <string>

namespace xgrammar {
class Grammar;
}

namespace fathom {

// The name of a rule that a completion may enter and never leave, because the rule or one of its
// alternatives matches no text at all; nothing if there is none. Examples are `root ::= root` and
// an empty character class. Regular expressions are assumed to match something.
std::optional<std::string> dead_end(const xgrammar::Grammar& grammar);

}  // namespace fathom
