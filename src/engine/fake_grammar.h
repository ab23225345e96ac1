// Grammars over the fake tokenizer's likely ids, which remember what they have accepted. Test code
// only.
#pragma once

#include <cstdint>
#include <memory>

#include "engine/token_grammar.h"

namespace fathom {

// Which ids may follow depends on all ids before, so a state that lost or kept one too many shows.
// Kinds: 0 may end at any time and goes on for ever; 1 may end after some tokens, and has to after
// a few more; 2 allows one id most of the time; 3 has a dead end after some tokens.
std::shared_ptr<const TokenGrammar> fake_grammar(int32_t kind);

}  // namespace fathom
