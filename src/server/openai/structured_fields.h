// The fields that ask for an answer of a certain form, and the grammar specification they become.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "engine/grammar_spec.h"
#include "server/openai/schema.h"

namespace fathom {

// OpenAI's response_format (chat and completions) and its flat form in /v1/responses.
struct ResponseFormat {
  std::string type = "text";  // text, json_object, json_schema
  json::value schema;         // of json_schema
};
void read_value(const json::value& value, ResponseFormat& out);
Type response_format_type();       // {"type":"json_schema","json_schema":{"name","schema"}}
Type flat_response_format_type();  // {"type":"json_schema","name","schema"}

struct StructuredOutputs {
  json::value json, choice;
  std::string regex, grammar, structural_tag;
  bool json_object = false;

  static const ObjectSchema& schema();
};

struct StructuredFields {
  ResponseFormat response_format;
  StructuredOutputs structured_outputs;
  json::value guided_json, guided_choice;
  std::string guided_regex, guided_grammar;

  static const ObjectSchema& schema();
};

// What a field asks for, and the field: "structured_outputs.regex".
struct WantedGrammar {
  std::string param;
  GrammarSpec spec;
};

// What the fields ask for; nothing if they ask for nothing. An error where two of them do, and
// where a schema that came as text is none.
ApiResult<std::optional<WantedGrammar>> grammar_of(const StructuredFields& fields);
std::optional<GrammarSpec> grammar_of(const ResponseFormat& format);

// A schema as an object, or as text that is one.
ApiResult<WantedGrammar> wanted_schema(std::string param, const json::value& schema);

// The one that is wanted; an error where there are several, or where it is too large.
ApiResult<std::optional<WantedGrammar>> only_one(std::vector<WantedGrammar> wanted);

// The error of a specification that is too large.
ApiResult<> check_grammar_size(const GrammarSpec& grammar, const std::string& param);

}  // namespace fathom
