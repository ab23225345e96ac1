#include "server/openai/openapi.h"

#include <algorithm>

#include "server/openai/generation.h"
#include "server/openai/token_requests.h"

namespace fathom {
namespace {

class SchemaPrinter {
 public:
  SchemaPrinter(const RequestLimits& limits, json::object& components)
      : limits_(limits), components_(components) {}

  json::object table(const ObjectSchema& schema) {
    json::object properties;
    json::array required;
    for (const Field& field : schema.fields) {
      json::object property = type(field.type);
      if (field.required) {
        required.push_back(json::string(field.name));
      } else {
        json::array or_null{std::move(property), json::object{{"type", "null"}}};
        property = {{"anyOf", std::move(or_null)}};
      }
      if (!field.description.empty()) property["description"] = field.description;
      properties[field.name] = std::move(property);
    }
    json::object out{{"type", "object"}, {"properties", std::move(properties)}};
    if (!required.empty()) out["required"] = std::move(required);
    out["additionalProperties"] = !limits_.refuse_unknown;
    return out;
  }

  json::object reference(const ObjectSchema& schema) {
    if (!components_.contains(schema.name)) {
      components_[schema.name] = nullptr;  // so that a table inside itself ends here
      components_[schema.name] = table(schema);
    }
    return {{"$ref", "#/components/schemas/" + std::string(schema.name)}};
  }

 private:
  json::object type(const Type& type) {
    switch (type.kind) {
      case Type::Kind::kAny:
        return {};
      case Type::Kind::kBoolean:
        return {{"type", "boolean"}};
      case Type::Kind::kInteger:
        return {{"type", "integer"},
                {"minimum", type.min_integer},
                {"maximum", type.limit == nullptr ? type.max_integer : limits_.*type.limit}};
      case Type::Kind::kNumber:
        return {{"type", "number"},
                {type.above_min ? "exclusiveMinimum" : "minimum", type.min},
                {"maximum", type.max}};
      case Type::Kind::kString:
        return string(type);
      case Type::Kind::kArray: {
        json::object out{{"type", "array"}, {"items", this->type(*type.items)}};
        sizes(type, "minItems", "maxItems", out);
        return out;
      }
      case Type::Kind::kObject:
        return type.object == nullptr ? json::object{{"type", "object"}} : reference(*type.object);
      case Type::Kind::kMap: {
        json::object out{{"type", "object"},
                         {"propertyNames", {{"pattern", "^(0|[1-9][0-9]{0,8})$"}}},
                         {"additionalProperties", this->type(*type.items)}};
        sizes(type, "minProperties", "maxProperties", out);
        return out;
      }
      case Type::Kind::kOneOf: {
        json::array alternatives;
        for (const Type& one : type.alternatives) alternatives.push_back(this->type(one));
        return {{"anyOf", std::move(alternatives)}};
      }
      case Type::Kind::kVariant:
        return variant(type);
    }
    return {};
  }

  static void sizes(const Type& type, const char* min, const char* max, json::object& out) {
    if (type.min_size > 0) out[min] = type.min_size;
    if (type.max_size != SIZE_MAX) out[max] = type.max_size;
  }

  // JSON Schema counts characters; as many bytes are a bound that holds for both.
  static json::object string(const Type& type) {
    json::object out{{"type", "string"}};
    if (!type.words.empty()) {
      json::array words;
      for (const std::string_view word : type.words) words.push_back(json::string(word));
      out["enum"] = std::move(words);
      return out;
    }
    sizes(type, "minLength", "maxLength", out);
    if (type.max_size != SIZE_MAX) out["maxLength"] = std::max<size_t>(type.max_size / 4, 1);
    if (type.is_name) out["pattern"] = "^[^\\u0000-\\u001f\\u007f]*$";
    return out;
  }

  // Tables of variants leave the tag's value open; here it is fixed.
  json::object variant(const Type& type) {
    json::array alternatives;
    for (const auto& [tag, schema] : type.variants) {
      json::object tag_schema{{"properties", {{type.tag, {{"const", tag}}}}}};
      if (type.default_tag != tag) tag_schema["required"] = {type.tag};
      json::array both{reference(*schema), std::move(tag_schema)};
      alternatives.push_back(json::object{{"allOf", std::move(both)}});
    }
    return {{"anyOf", std::move(alternatives)}};
  }

  const RequestLimits& limits_;
  json::object& components_;
};

struct Route {
  const char* path;
  const char* summary;
  const ObjectSchema* body;  // null: GET
  bool may_stream = false;
};

json::object reply(const char* description, bool may_stream) {
  json::object content{{"application/json", {{"schema", json::object()}}}};
  if (may_stream) content["text/event-stream"] = {{"schema", {{"type", "string"}}}};
  return {{"description", description}, {"content", std::move(content)}};
}

json::object operation(const Route& route, SchemaPrinter& printer) {
  json::object replies{{"200", reply("The answer", route.may_stream)}};
  const json::object error = reply("An error object says why", false);
  for (const char* status : {"400", "401", "404", "413", "429", "503"}) replies[status] = error;
  json::object out{{"summary", route.summary}};
  if (route.body != nullptr) {
    out["requestBody"] = {
        {"required", true},
        {"content", {{"application/json", {{"schema", printer.reference(*route.body)}}}}}};
  }
  out["responses"] = std::move(replies);
  return out;
}

}  // namespace

json::object json_schema_of(const ObjectSchema& schema, const RequestLimits& limits,
                            json::object& components) {
  return SchemaPrinter(limits, components).table(schema);
}

json::object openapi_document(std::string_view version, const RequestLimits& limits) {
  const Route routes[] = {
      {"/v1/chat/completions", "Answer a conversation", &ChatRequest::schema(), true},
      {"/v1/completions", "Continue a text", &CompletionRequest::schema(), true},
      {"/v1/messages", "Answer a conversation (Anthropic)", &MessagesRequest::schema(), true},
      {"/v1/messages/count_tokens", "Tokens of a conversation", &MessagesRequest::count_schema()},
      {"/v1/responses", "Answer a conversation (OpenAI Responses)", &ResponsesRequest::schema(),
       true},
      {"/generate", "Continue a text or token ids (SGLang)", &GenerateRequest::schema(), true},
      {"/tokenize", "Text or conversation to token ids", &TokenizeRequest::schema()},
      {"/detokenize", "Token ids to text", &DetokenizeRequest::schema()},
      {"/v1/models", "The model that is served", nullptr},
      {"/version", "The program's version", nullptr},
      {"/get_model_info", "The model that is served (SGLang)", nullptr},
      {"/server_info", "The server's settings and state", nullptr},
  };
  json::object components, paths;
  SchemaPrinter printer(limits, components);
  for (const Route& route : routes) {
    const char* method = route.body == nullptr ? "get" : "post";
    paths[route.path] = json::object{{method, operation(route, printer)}};
  }
  return {{"openapi", "3.1.0"},
          {"info", {{"title", "Fathom"}, {"version", version}}},
          {"paths", std::move(paths)},
          {"components", {{"schemas", std::move(components)}}}};
}

}  // namespace fathom
