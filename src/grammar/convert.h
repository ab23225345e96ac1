// Converts a request's grammar to XGrammar's form, after checking all limits.
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

// Literals that spell markup match markup tokens.
//
// Refuses what is too large (grammar/text_limits.h), what XGrammar cannot parse or would parse only
// in part, and grammars with dead ends (grammar/dead_ends.h). May take seconds for input just
// within the limits. Does not throw.
Result<xgrammar::Grammar> convert(const GrammarSpec& spec, const MarkupTokens& markup);

}  // namespace fathom
