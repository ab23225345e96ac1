#include "server/openai/structured_fields.h"

namespace fathom {
namespace {

using Kind = GrammarSpec::Kind;

// Tables without a struct: checked only; the values are read below.

const ObjectSchema& untagged_format() {
  static const ObjectSchema kSchema =
      SchemaOf<Unread>("SimpleFormat").required_checked("type", string(), "The form").build();
  return kSchema;
}

Type schema_type() { return one_of({any_object(), boolean()}); }

const ObjectSchema& named_schema() {
  static const ObjectSchema kSchema =
      SchemaOf<Unread>("NamedSchema")
          .required_checked("name", name_string(), "A name for it")
          .checked("schema", schema_type(), "The JSON schema; without one any object")
          .checked("strict", boolean(), "Always so")
          .checked("description", string(), "What it is for")
          .build();
  return kSchema;
}

const ObjectSchema& nested_format() {
  static const ObjectSchema kSchema =
      SchemaOf<Unread>("JsonSchemaFormat")
          .required_checked("type", string(), "json_schema")
          .required_checked("json_schema", object_of(named_schema()), "What the answer looks like")
          .build();
  return kSchema;
}

const ObjectSchema& flat_format() {
  static const ObjectSchema kSchema = [] {
    ObjectSchema schema = SchemaOf<Unread>("FlatJsonSchemaFormat")
                              .required_checked("type", string(), "json_schema")
                              .build();
    const auto& inner = named_schema().fields;
    schema.fields.insert(schema.fields.end(), inner.begin(), inner.end());
    return schema;
  }();
  return kSchema;
}

Type choices_type() { return array_of(string(1, kMaxGrammarBytes), 1, 10'000); }
Type json_type() { return one_of({any_object(), boolean(), string(1, kMaxGrammarBytes)}); }

}  // namespace

void read_value(const json::value& value, ResponseFormat& out) {
  const json::object& object = value.get_object();
  out.type = object.at("type").get_string();
  if (out.type != "json_schema") return;
  const json::value* nested = object.if_contains("json_schema");
  const json::object& holder = nested == nullptr ? object : nested->get_object();
  const json::value* schema = holder.if_contains("schema");
  out.schema = schema == nullptr || schema->is_null() ? json::value{{"type", "object"}} : *schema;
}

Type response_format_type() {
  return variant("type", {{"text", &untagged_format()},
                          {"json_object", &untagged_format()},
                          {"json_schema", &nested_format()}});
}

Type flat_response_format_type() {
  return variant("type", {{"text", &untagged_format()},
                          {"json_object", &untagged_format()},
                          {"json_schema", &flat_format()}});
}

const ObjectSchema& StructuredOutputs::schema() {
  using F = StructuredOutputs;
  static const ObjectSchema kSchema =
      SchemaOf<F>("StructuredOutputs")
          .field("json", &F::json, json_type(), "A JSON schema")
          .field("regex", &F::regex, string(1, kMaxGrammarBytes), "A regular expression")
          .field("choice", &F::choice, choices_type(), "One of these strings")
          .field("grammar", &F::grammar, string(1, kMaxGrammarBytes), "A grammar in EBNF")
          .field("json_object", &F::json_object, boolean(), "Any JSON object")
          .field("structural_tag", &F::structural_tag, string(1, kMaxGrammarBytes),
                 "A structural tag, as JSON text")
          .build();
  return kSchema;
}

const ObjectSchema& StructuredFields::schema() {
  using F = StructuredFields;
  static const ObjectSchema kSchema =
      SchemaOf<F>("Structured")
          .field("response_format", &F::response_format, response_format_type(),
                 "The form of the answer")
          .field("structured_outputs", &F::structured_outputs,
                 object_of(StructuredOutputs::schema()), "The form of the answer, one of these")
          .field("guided_json", &F::guided_json, json_type(), "structured_outputs.json")
          .field("guided_regex", &F::guided_regex, string(1, kMaxGrammarBytes),
                 "structured_outputs.regex")
          .field("guided_choice", &F::guided_choice, choices_type(), "structured_outputs.choice")
          .field("guided_grammar", &F::guided_grammar, string(1, kMaxGrammarBytes),
                 "structured_outputs.grammar")
          .build();
  return kSchema;
}

std::optional<GrammarSpec> grammar_of(const ResponseFormat& format) {
  if (format.type == "json_object") return GrammarSpec{Kind::kJsonObject};
  if (format.type == "json_schema") {
    return GrammarSpec{Kind::kJsonSchema, json::serialize(format.schema)};
  }
  return std::nullopt;
}

ApiResult<WantedGrammar> wanted_schema(std::string param, const json::value& schema) {
  if (!schema.is_string()) {
    return WantedGrammar{std::move(param), {Kind::kJsonSchema, json::serialize(schema)}};
  }
  const auto parsed = parse_json(schema.get_string(), param);
  if (!parsed) return tl::unexpected(ApiError(400, parsed.error().message, param));
  if (!parsed->is_object() && !parsed->is_bool()) {
    return bad_field(param, "{} is {}, expected a JSON schema", param, brief(*parsed));
  }
  return WantedGrammar{std::move(param), {Kind::kJsonSchema, json::serialize(*parsed)}};
}

ApiResult<std::optional<WantedGrammar>> grammar_of(const StructuredFields& fields) {
  std::vector<WantedGrammar> wanted;
  const auto add_text = [&](const char* param, Kind kind, const std::string& text) {
    if (!text.empty()) wanted.push_back({param, {kind, text}});
  };
  if (const auto format = grammar_of(fields.response_format)) {
    wanted.push_back({"response_format", *format});
  }
  const StructuredOutputs& structured = fields.structured_outputs;
  for (const auto& [param, schema] : {std::pair("structured_outputs.json", &structured.json),
                                      std::pair("guided_json", &fields.guided_json)}) {
    if (schema->is_null()) continue;
    FATHOM_TRY(auto one, wanted_schema(param, *schema));
    wanted.push_back(std::move(one));
  }
  for (const auto& [param, choice] : {std::pair("structured_outputs.choice", &structured.choice),
                                      std::pair("guided_choice", &fields.guided_choice)}) {
    if (!choice->is_null()) {
      GrammarSpec spec{Kind::kChoice};
      for (const json::value& text : choice->get_array()) {
        spec.choices.emplace_back(text.get_string());
      }
      wanted.push_back({param, std::move(spec)});
    }
  }
  add_text("structured_outputs.regex", Kind::kRegex, structured.regex);
  add_text("guided_regex", Kind::kRegex, fields.guided_regex);
  add_text("structured_outputs.grammar", Kind::kEbnf, structured.grammar);
  add_text("guided_grammar", Kind::kEbnf, fields.guided_grammar);
  add_text("structured_outputs.structural_tag", Kind::kStructuralTag, structured.structural_tag);
  if (structured.json_object) {
    wanted.push_back({"structured_outputs.json_object", {Kind::kJsonObject}});
  }
  return only_one(std::move(wanted));
}

ApiResult<std::optional<WantedGrammar>> only_one(std::vector<WantedGrammar> wanted) {
  if (wanted.empty()) return std::nullopt;
  if (wanted.size() > 1) {
    return bad_field(wanted[1].param, "{} and {} both say what the answer looks like, only one may",
                     wanted[0].param, wanted[1].param);
  }
  FATHOM_RETURN_IF_ERROR(check_grammar_size(wanted[0].spec, wanted[0].param));
  return std::move(wanted[0]);
}

ApiResult<> check_grammar_size(const GrammarSpec& grammar, const std::string& param) {
  size_t bytes = grammar.text.size();
  for (const std::string& choice : grammar.choices) bytes += choice.size();
  if (bytes <= kMaxGrammarBytes) return {};
  return bad_field(param, "{} has {} bytes, at most {} are allowed", param, bytes,
                   kMaxGrammarBytes);
}

}  // namespace fathom
