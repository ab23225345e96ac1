// The flags that say what an answer has to match: of `run`.
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
  std::string json_schema;  // a file's name or the schema itself
  std::string regex;
  std::vector<std::string> choices;
};

void add_grammar_flags(CLI::App& app, GrammarFlags* flags);

// What the flags ask for, nothing without them; reads the schema's file. At most one may be given.
Result<std::optional<GrammarSpec>> grammar_spec(const GrammarFlags& flags);

// Compiles it for the request, whose answer may begin inside reasoning: then the grammar begins
// behind that.
Result<> add_grammar(const GrammarSpec& spec, std::shared_ptr<const Tokenizer> tokenizer,
                     int64_t vocab_size, bool opens_reasoning, Request& request);

}  // namespace fathom
