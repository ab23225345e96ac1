// XGrammar's part of a CompiledGrammar, for the files of this room that create or use it.
#pragma once

#include <memory>

#include "grammar/compiled_grammar.h"

namespace xgrammar {
class CompiledGrammar;
}

namespace fathom {

std::shared_ptr<const CompiledGrammar> make_compiled_grammar(xgrammar::CompiledGrammar compiled);

}  // namespace fathom
