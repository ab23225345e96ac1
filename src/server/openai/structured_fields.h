// Fields that request structured outputs, and the grammar specification made from them.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "engine/grammar_spec.h"
#include "server/openai/schema.h"

namespace fathom {

// OpenAI's response_format (chat and completions), and its flat form in /v1/responses.
struct ResponseFormat {
  std::string type = "text";  // text, json_object, json_schema
  json::value schema;         // with json_schema
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

// The grammar of one field, and the field's path: "structured_outputs.regex".
struct WantedGrammar {
  std::string param;
  GrammarSpec spec;
};

// Returns the requested grammar; nullopt if no field asks for one. Error: several fields ask, or a
// schema given as text is not JSON.
ApiResult<std::optional<WantedGrammar>> grammar_of(const StructuredFields& fields);
std::optional<GrammarSpec> grammar_of(const ResponseFormat& format);

// Accepts a schema as an object or as its JSON text.
ApiResult<WantedGrammar> wanted_schema(std::string param, const json::value& schema);

// Returns the only grammar requested. Error: several are requested, or it is too large.
ApiResult<std::optional<WantedGrammar>> only_one(std::vector<WantedGrammar> wanted);

// Returns an error if the specification is too large.
ApiResult<> check_grammar_size(const GrammarSpec& grammar, const std::string& param);

}  // namespace fathom
