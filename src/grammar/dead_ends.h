// Grammars that cannot be matched to their end.
#pragma once

#include <optional>
#include <string>

namespace xgrammar {
class Grammar;
}

namespace fathom {

// The name of a rule that an answer may enter and never leave, because it or one of its
// alternatives matches no text at all; nothing if there is none. `root ::= root` is one, and a
// class without characters. A regular expression is taken to match something.
std::optional<std::string> dead_end(const xgrammar::Grammar& grammar);

}  // namespace fathom
