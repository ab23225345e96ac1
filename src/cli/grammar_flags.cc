#include "cli/grammar_flags.h"

#include <utility>

#include "base/json.h"
#include "grammar/grammar_compiler.h"
#include "grammar/text_limits.h"

namespace fathom {
namespace {

constexpr const char* kEndOfReasoning = "</think>";

// A schema is an object, true or false; the latter two are unlikely file names.
bool is_schema(const std::string& text) {
  const size_t first = text.find_first_not_of(" \t\r\n");
  return first == std::string::npos || text[first] == '{' || text == "true" || text == "false";
}

}  // namespace

void add_grammar_flags(CLI::App& app, GrammarFlags* flags) {
  FlagGroup group(app, "Structured output");
  group.text("--json-schema", &flags->json_schema, "FILE|TEXT",
             "The answer is JSON that matches this schema");
  group.text("--regex", &flags->regex, "REGEX", "The whole answer matches this regular expression");
  group.texts("--choice", &flags->choices, "TEXT",
              "The answer is this text or another --choice; may be given several times");
}

Result<std::optional<GrammarSpec>> grammar_spec(const GrammarFlags& flags) {
  const int given = !flags.json_schema.empty() + !flags.regex.empty() + !flags.choices.empty();
  if (given == 0) return std::nullopt;
  if (given > 1) return invalid("--json-schema, --regex and --choice exclude each other");
  if (!flags.regex.empty()) return GrammarSpec{GrammarSpec::Kind::kRegex, flags.regex, {}};
  if (!flags.choices.empty()) return GrammarSpec{GrammarSpec::Kind::kChoice, "", flags.choices};
  std::string schema = flags.json_schema;
  if (!is_schema(schema)) {
    auto text = read_text_file(schema, kMaxGrammarBytes);
    if (!text) return with_context("--json-schema: ", text.error());
    schema = std::move(*text);
  }
  return GrammarSpec{GrammarSpec::Kind::kJsonSchema, std::move(schema), {}};
}

Result<> add_grammar(const GrammarSpec& spec, std::shared_ptr<const Tokenizer> tokenizer,
                     int64_t vocab_size, bool opens_reasoning, Request& request) {
  if (tokenizer == nullptr) {
    return invalid("what the answer has to match needs the model's tokenizer.json");
  }
  if (opens_reasoning) {
    request.grammar_begins_after = tokenizer->token_id(kEndOfReasoning);
    if (!request.grammar_begins_after) {
      return invalid("the answer begins with reasoning, whose end {} is no token of this model",
                     kEndOfReasoning);
    }
  }
  // No other request waits behind this one.
  GrammarCompiler compiler(std::move(tokenizer), vocab_size,
                           {.deadline = GrammarCompilerOptions::kPatient});
  FATHOM_TRY(request.grammar, compiler.compile(spec));
  return {};
}

}  // namespace fathom
