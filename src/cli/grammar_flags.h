// The flags of `run` that constrain the completion.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cli/flags.h"
#include "engine/grammar_spec.h"
#include "engine/request.h"
#include "tokenizer/tokenizer.h"

namespace fathom {

struct GrammarFlags {
  std::string json_schema;  // a file name or the schema itself
  std::string regex;
  std::vector<std::string> choices;
};

void add_grammar_flags(CLI::App& app, GrammarFlags* flags);

// The grammar that the flags request, if any; reads the schema's file. At most one flag may be
// given.
Result<std::optional<GrammarSpec>> grammar_spec(const GrammarFlags& flags);

// Compiles the grammar and sets it in the request. If the completion begins inside reasoning, the
// grammar applies after it.
Result<> add_grammar(const GrammarSpec& spec, std::shared_ptr<const Tokenizer> tokenizer,
                     int64_t vocab_size, bool opens_reasoning, Request& request);

}  // namespace fathom
