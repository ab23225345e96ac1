#include "grammar/convert.h"

#include <xgrammar/grammar.h>

#include <new>

#include "base/utf8.h"
#include "grammar/schema_check.h"
#include "grammar/structural_tag_check.h"
#include "grammar/text_limits.h"
#include "grammar/xgrammar_messages.h"

namespace fathom {
namespace {

const char* field_of(GrammarSpec::Kind kind) {
  switch (kind) {
    case GrammarSpec::Kind::kJsonObject:
      return "json_object";
    case GrammarSpec::Kind::kJsonSchema:
      return "json_schema";
    case GrammarSpec::Kind::kRegex:
      return "regex";
    case GrammarSpec::Kind::kChoice:
      return "choice";
    case GrammarSpec::Kind::kEbnf:
      return "grammar";
    case GrammarSpec::Kind::kStructuralTag:
      return "structural_tag";
  }
  return "grammar";
}

// The library shows the byte that it stumbled over, which may be a part of a character.
std::string well_formed(std::string_view message) { return replace_ill_formed(message); }

// Between two signs of JSON: enough for a new line and seven levels indented by two. Without a
// limit a model that would rather say something else writes white space to the end of its answer.
constexpr int kMaxWhitespace = 16;

xgrammar::Grammar from_schema(const std::string& schema, bool is_strict) {
  return xgrammar::Grammar::FromJSONSchema(schema, /*any_whitespace=*/true, std::nullopt,
                                           std::nullopt, is_strict, kMaxWhitespace);
}

Result<std::string> ebnf_of_choices(const std::vector<std::string>& choices) {
  if (choices.empty()) return invalid("choice has no strings");
  std::string ebnf = "root ::= ";
  size_t bytes = 0;
  for (size_t i = 0; i < choices.size(); ++i) {
    const std::string field = fmt::format("choice[{}]", i);
    if (choices[i].empty()) return invalid("{} is empty", field);
    FATHOM_RETURN_IF_ERROR(check_text(choices[i], field));
    bytes += choices[i].size();
    if (bytes > kMaxGrammarBytes) {
      return invalid("choice has more than {} bytes", kMaxGrammarBytes);
    }
    ebnf += i > 0 ? " | \"" : "\"";
    for (const char c : choices[i]) {
      const auto byte = static_cast<unsigned char>(c);
      if (c == '"' || c == '\\') {
        ebnf += '\\';
        ebnf += c;
      } else if (byte < 0x20 || byte == 0x7F) {
        ebnf += fmt::format("\\x{:02x}", byte);
      } else {
        ebnf += c;
      }
    }
    ebnf += '"';
  }
  return ebnf + "\n";
}

Result<xgrammar::Grammar> convert_unguarded(const GrammarSpec& spec) {
  using xgrammar::Grammar;
  switch (spec.kind) {
    case GrammarSpec::Kind::kJsonObject:
      return from_schema(R"({"type":"object"})", /*is_strict=*/false);
    case GrammarSpec::Kind::kJsonSchema: {
      FATHOM_TRY(const std::string schema, check_schema(spec.text));
      return from_schema(schema, /*is_strict=*/true);
    }
    case GrammarSpec::Kind::kRegex:
      FATHOM_RETURN_IF_ERROR(check_regex(spec.text, "regex"));
      return Grammar::FromRegex(spec.text);
    case GrammarSpec::Kind::kChoice: {
      FATHOM_TRY(const std::string ebnf, ebnf_of_choices(spec.choices));
      return Grammar::FromEBNF(ebnf);
    }
    case GrammarSpec::Kind::kEbnf:
      FATHOM_RETURN_IF_ERROR(check_ebnf(spec.text, "grammar"));
      return Grammar::FromEBNF(spec.text);
    case GrammarSpec::Kind::kStructuralTag: {
      FATHOM_RETURN_IF_ERROR(check_structural_tag(spec.text));
      auto made = Grammar::FromStructuralTag(spec.text);
      if (auto* const grammar = std::get_if<Grammar>(&made)) return std::move(*grammar);
      return std::visit(
          [](const auto& problem) -> Result<Grammar> {
            if constexpr (std::is_convertible_v<decltype(problem), const std::exception&>) {
              return invalid("structural_tag: {}", well_formed(problem.what()));
            } else {
              return std::visit(
                  [](const std::exception& inner) -> Result<Grammar> {
                    return invalid("structural_tag: {}", well_formed(inner.what()));
                  },
                  problem);
            }
          },
          std::get<1>(made));
    }
  }
  return invalid("the kind of grammar is not known");
}

}  // namespace

Result<xgrammar::Grammar> convert(const GrammarSpec& spec) {
  XGrammarWarnings warnings;
  try {
    auto grammar = convert_unguarded(spec);
    if (grammar && !warnings.texts().empty()) {
      return invalid("{}: {}", field_of(spec.kind), well_formed(warnings.texts().front()));
    }
    return grammar;
  } catch (const std::bad_alloc&) {
    throw;  // not the grammar's fault
  } catch (const std::exception& problem) {
    return invalid("{}: {}", field_of(spec.kind), well_formed(problem.what()));
  }
}

}  // namespace fathom
