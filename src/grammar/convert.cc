#include "grammar/convert.h"

#include <xgrammar/grammar.h>

#include <new>

#include "base/json.h"
#include "base/utf8.h"
#include "grammar/dead_ends.h"
#include "grammar/markup_tokens.h"
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

// XGrammar's messages contain the byte at which parsing failed, which may be a part of a character.
std::string well_formed(std::string_view message) { return replace_ill_formed(message); }

// White space between JSON tokens is limited to nothing, one blank, or a newline with an indent of
// at most kMaxIndent blanks or tabs (cmake/xgrammar.patch): sixteen levels of two. Without a limit,
// a model that would rather write something else fills its output with white space.
constexpr int kMaxIndent = 32;

xgrammar::Grammar from_schema(const std::string& schema, bool is_strict) {
  return xgrammar::Grammar::FromJSONSchema(schema, /*any_whitespace=*/true, std::nullopt,
                                           std::nullopt, is_strict, kMaxIndent);
}

// Applies the same limit to each schema in a structural tag.
void limit_whitespace(json::value& tag) {
  if (json::array* const list = tag.if_array()) {
    for (json::value& one : *list) limit_whitespace(one);
  }
  json::object* const object = tag.if_object();
  if (object == nullptr) return;
  for (auto& [key, value] : *object) {
    if (key != "json_schema") limit_whitespace(value);
  }
  if (object->contains("json_schema")) (*object)["max_whitespace_cnt"] = kMaxIndent;
}

Result<std::string> ebnf_of_choices(const std::vector<std::string>& choices,
                                    const MarkupTokens& markup) {
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
    for (const char c : markup.in_literal(choices[i])) {
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

Result<xgrammar::Grammar> convert_unguarded(const GrammarSpec& spec, const MarkupTokens& markup) {
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
      return Grammar::FromRegex(markup.in_regex(spec.text));
    case GrammarSpec::Kind::kChoice: {
      FATHOM_TRY(const std::string ebnf, ebnf_of_choices(spec.choices, markup));
      return Grammar::FromEBNF(ebnf);
    }
    case GrammarSpec::Kind::kEbnf:
      FATHOM_RETURN_IF_ERROR(check_ebnf(spec.text, "grammar"));
      return Grammar::FromEBNF(markup.in_ebnf(spec.text));
    case GrammarSpec::Kind::kStructuralTag: {
      FATHOM_RETURN_IF_ERROR(check_structural_tag(spec.text));
      FATHOM_TRY(const json::value tag, parse_json(spec.text, "structural_tag", kMaxGrammarDepth));
      json::value marked = markup.in_structural_tag(tag);
      limit_whitespace(marked);
      auto made = Grammar::FromStructuralTag(json::serialize(marked));
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

Result<xgrammar::Grammar> convert(const GrammarSpec& spec, const MarkupTokens& markup) {
  XGrammarWarnings warnings;
  try {
    auto grammar = convert_unguarded(spec, markup);
    if (grammar && !warnings.texts().empty()) {
      return invalid("{}: {}", field_of(spec.kind), well_formed(warnings.texts().front()));
    }
    if (!grammar) return grammar;
    if (const auto rule = dead_end(*grammar)) {
      return invalid("{}: the rule {} or one of its alternatives matches no text at all",
                     field_of(spec.kind), well_formed(*rule));
    }
    return grammar;
  } catch (const std::bad_alloc&) {
    throw;  // not an error of the grammar
  } catch (const std::exception& problem) {
    return invalid("{}: {}", field_of(spec.kind), well_formed(problem.what()));
  }
}

}  // namespace fathom
