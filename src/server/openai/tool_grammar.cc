#include "server/openai/tool_grammar.h"

#include "base/check.h"
#include "chat/call_syntax.h"

namespace fathom {
namespace {

bool is_strict(const Tool& tool) {
  const json::value* strict = tool.function().if_contains("strict");
  return strict != nullptr && strict->is_bool() && strict->get_bool();
}

json::object literal(std::string_view text) { return {{"type", "const_string"}, {"value", text}}; }

// Returns the grammar of an argument's value: a string stands as it is, other values as JSON.
json::value value_of(const json::value& schema) {
  const json::value* type = schema.is_object() ? schema.get_object().if_contains("type") : nullptr;
  if (type == nullptr || !type->is_string() || type->get_string() == "string") {
    return {{"type", "any_text"}};
  }
  return {{"type", "json_schema"}, {"json_schema", schema}};
}

// Returns the grammar of arguments with a key and a value each, at least one if any is required.
json::value keyed_arguments(const CallSyntax& syntax, const json::value& parameters) {
  const json::object* object = parameters.if_object();
  const json::value* properties = object != nullptr ? object->if_contains("properties") : nullptr;
  if (properties == nullptr || !properties->is_object() || properties->get_object().empty()) {
    return {{"type", "any_text"}};
  }
  json::array tags;
  for (const auto& [name, schema] : properties->get_object()) {
    tags.push_back(
        {{"type", "tag"},
         {"begin", std::string(syntax.key_begin) + std::string(name) + std::string(syntax.key_end)},
         {"content", value_of(schema)},
         {"end", syntax.value_end}});
  }
  const json::value* required = object->if_contains("required");
  const bool any = required != nullptr && required->is_array() && !required->get_array().empty();
  return {{"type", "tags_with_separator"},
          {"tags", std::move(tags)},
          {"separator", ""},
          {"at_least_one", any},
          {"stop_after_first", false}};
}

// Returns the grammar of the text between a call's header and its end.
json::value arguments_of(const CallSyntax& syntax, const Tool& tool) {
  if (!syntax.key_begin.empty()) return keyed_arguments(syntax, tool.parameters());
  if (!syntax.json_arguments) return {{"type", "any_text"}};
  return {{"type", "json_schema"}, {"json_schema", tool.parameters()}};
}

json::object call_of(const CallSyntax& syntax, const Tool& tool) {
  const std::string begin = std::string(syntax.before_name) + tool.name;
  if (!syntax.numbered) {
    return {{"type", "tag"},
            {"begin", begin + std::string(syntax.after_name)},
            {"content", arguments_of(syntax, tool)},
            {"end", syntax.call_end}};
  }
  return {{"type", "tag"},
          {"begin", begin + ":"},
          {"content",
           {{"type", "sequence"},
            {"elements",
             {{{"type", "regex"}, {"pattern", "[0-9]{1,4}"}},
              literal(syntax.after_name),
              arguments_of(syntax, tool)}}}},
          {"end", syntax.call_end}};
}

GrammarSpec spec_of(json::object format) {
  return {GrammarSpec::Kind::kStructuralTag,
          json::serialize(json::object{{"type", "structural_tag"}, {"format", std::move(format)}})};
}

// Returns the grammar of calls only, at least one.
json::object only_calls(const CallSyntax& syntax, json::array calls, bool one_call) {
  json::object list{{"type", "tags_with_separator"},
                    {"tags", std::move(calls)},
                    {"separator", syntax.between},
                    {"at_least_one", true},
                    {"stop_after_first", one_call}};
  if (syntax.block_begin.empty() && syntax.block_end.empty()) return list;
  return {{"type", "sequence"},
          {"elements", {literal(syntax.block_begin), std::move(list), literal(syntax.block_end)}}};
}

}  // namespace

std::optional<GrammarSpec> tool_grammar(ChatFormat format, const std::vector<Tool>& tools,
                                        const ToolChoice& choice, bool parallel,
                                        const std::optional<GrammarSpec>& text) {
  const auto syntax = call_syntax(format);
  if (!syntax || choice.mode == ToolChoice::Mode::kNone) return text;
  const bool forced = choice.mode != ToolChoice::Mode::kAuto;
  json::array calls;
  bool any_strict = false;
  for (const Tool& tool : tools) {
    if (choice.mode == ToolChoice::Mode::kNamed && tool.name != choice.name) continue;
    any_strict = any_strict || is_strict(tool);
    calls.push_back(call_of(*syntax, tool));
  }
  if (calls.empty()) return text;
  const bool one_call = !parallel || syntax->single || choice.mode == ToolChoice::Mode::kNamed;
  if (forced) return spec_of(only_calls(*syntax, std::move(calls), one_call));
  if (!text) {
    if (!any_strict) return std::nullopt;
    return spec_of({{"type", "triggered_tags"},
                    {"triggers", {syntax->before_name}},
                    {"tags", std::move(calls)},
                    {"at_least_one", false},
                    {"stop_after_first", syntax->single}});
  }
  json::value schema{{"type", "object"}};
  if (text->kind == GrammarSpec::Kind::kJsonSchema) {
    const auto parsed = parse_json(text->text, "the schema");
    FATHOM_CHECK(parsed.has_value(), "{}", parsed.error().message);
    schema = *parsed;
  } else if (text->kind != GrammarSpec::Kind::kJsonObject) {
    return text;
  }
  return spec_of({{"type", "or"},
                  {"elements",
                   {only_calls(*syntax, std::move(calls), one_call),
                    {{"type", "json_schema"}, {"json_schema", std::move(schema)}}}}});
}

}  // namespace fathom
