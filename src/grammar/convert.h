// From what a request wrote to XGrammar's form of it, with all limits checked first.
#pragma once

#include "base/status.h"
#include "engine/grammar_spec.h"

namespace fathom {
class MarkupTokens;
}
namespace xgrammar {
class Grammar;
}

namespace fathom {

// Literals that spell markup are made to take its tokens.
//
// Refuses what is too large (grammar/text_limits.h), what XGrammar cannot read, and what it would
// only read in part, and grammars with dead ends (grammar/dead_ends.h). May take seconds on what
// passes the limits just so. Does not throw.
Result<xgrammar::Grammar> convert(const GrammarSpec& spec, const MarkupTokens& markup);

}  // namespace fathom
