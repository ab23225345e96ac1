#include "server/openai/openapi.h"

#include "server/openai/generation.h"
#include "server/openai/reply_schemas.h"
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
      components_[schema.name] = nullptr;  // ends the recursion of a table that contains itself
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
                         {"propertyNames", {{"pattern", "^(0|[1-9][0-9]{0,9})$"}}},
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

  // Limits count bytes: a string with more characters than that is too long in any case.
  static json::object string(const Type& type) {
    json::object out{{"type", "string"}};
    if (!type.words.empty()) {
      json::array words;
      for (const std::string_view word : type.words) words.push_back(json::string(word));
      out["enum"] = std::move(words);
      return out;
    }
    sizes(type, "minLength", "maxLength", out);
    if (type.is_name) out["pattern"] = "^[^\\u0000-\\u001f\\u007f]*$";
    return out;
  }

  // Variant tables leave the tag's value open; the document fixes it.
  json::object variant(const Type& type) {
    json::array alternatives;
    for (const auto& [tag, schema] : type.variants) {
      json::object fixed{{"const", tag}};
      if (type.default_tag == tag) fixed = {{"enum", json::array{json::string(tag), nullptr}}};
      json::object tag_schema{{"properties", {{type.tag, std::move(fixed)}}}};
      if (type.default_tag != tag) tag_schema["required"] = {type.tag};
      json::array both{reference(*schema), std::move(tag_schema)};
      alternatives.push_back(json::object{{"allOf", std::move(both)}});
    }
    return {{"anyOf", std::move(alternatives)}};
  }

  const RequestLimits& limits_;
  json::object& components_;
};

json::object content(std::string_view type, json::object schema) {
  return {{type, json::object{{"schema", std::move(schema)}}}};
}

json::object reference_to(std::string_view name) {
  return {{"$ref", "#/components/schemas/" + std::string(name)}};
}

json::object success(const Operation& operation) {
  json::object schema =
      operation.reply.empty() ? json::object{{"type", "string"}} : reference_to(operation.reply);
  json::object contents = content(operation.content_type, std::move(schema));
  if (operation.may_stream) {
    // The schema of one event.
    json::object event{
        {"type", "object"},
        {"required", {"data"}},
        {"properties", {{"event", {{"type", "string"}}}, {"data", {{"type", "string"}}}}}};
    contents["text/event-stream"] = {{"schema", std::move(event)}};
  }
  return {{"description", "The answer"}, {"content", std::move(contents)}};
}

// Returns an error response. The transport's own errors have OpenAI's shape on every endpoint.
json::object failure(const Operation& operation, int status) {
  json::object schema = reference_to("Error");
  if (operation.is_anthropic) {
    json::array either{std::move(schema), reference_to("AnthropicError")};
    schema = {{"anyOf", std::move(either)}};
  }
  json::object out{{"description", "An error object says why"},
                   {"content", content("application/json", std::move(schema))}};
  const bool passes = status == 429 || status == 503;
  if (passes) {
    out["headers"] = {{"Retry-After", {{"schema", {{"type", "string"}}}}}};
  }
  return out;
}

json::array path_parameters(std::string_view path) {
  json::array out;
  for (size_t at = path.find('{'); at != path.npos; at = path.find('{', at + 1)) {
    const std::string_view name = path.substr(at + 1, path.find('}', at) - at - 1);
    out.push_back({{"name", name},
                   {"in", "path"},
                   {"required", true},
                   {"schema", {{"type", "string"}, {"minLength", 1}}}});
  }
  return out;
}

// Returns the error statuses of the transport and the engine.
std::vector<int> failure_statuses(const Operation& operation) {
  std::vector<int> statuses = {400, 408, 413, 414, 415, 417, 421, 431, 500, 501, 503, 505};
  if (operation.needs_key) statuses.push_back(401);
  if (operation.method != "get") statuses.push_back(403);
  if (operation.may_stream) statuses.push_back(429);
  if (operation.is_missing || operation.path.find('{') != operation.path.npos) {
    statuses.push_back(404);
  }
  return statuses;
}

}  // namespace

json::object json_schema_of(const ObjectSchema& schema, const RequestLimits& limits,
                            json::object& components) {
  return SchemaPrinter(limits, components).table(schema);
}

void add_operation(const Operation& operation, const RequestLimits& limits,
                   json::object& document) {
  json::object& components = document["components"].as_object()["schemas"].as_object();
  json::object replies;
  if (!operation.is_missing) replies["200"] = success(operation);
  for (const int status : failure_statuses(operation)) {
    replies[std::to_string(status)] = failure(operation, status);
  }
  json::object out{{"summary", operation.summary}};
  if (json::array parameters = path_parameters(operation.path); !parameters.empty()) {
    out["parameters"] = std::move(parameters);
  }
  if (operation.body != nullptr) {
    json::object schema = SchemaPrinter(limits, components).reference(*operation.body);
    out["requestBody"] = {{"required", true},
                          {"content", content("application/json", std::move(schema))}};
  }
  if (!operation.needs_key) out["security"] = json::array();
  out["responses"] = std::move(replies);
  json::value& path = document["paths"].as_object()[operation.path];
  if (!path.is_object()) path = json::object();
  path.as_object()[operation.method] = std::move(out);
}

json::object openapi_document(std::string_view version, const RequestLimits& limits) {
  const Operation operations[] = {
      {.method = "post",
       .path = "/v1/chat/completions",
       .summary = "Answer a conversation",
       .body = &ChatRequest::schema(),
       .reply = "ChatCompletion",
       .may_stream = true},
      {.method = "post",
       .path = "/v1/completions",
       .summary = "Continue a text",
       .body = &CompletionRequest::schema(),
       .reply = "Completion",
       .may_stream = true},
      {.method = "post",
       .path = "/v1/messages",
       .summary = "Answer a conversation (Anthropic)",
       .body = &MessagesRequest::schema(),
       .reply = "AnthropicMessage",
       .may_stream = true,
       .is_anthropic = true},
      {.method = "post",
       .path = "/v1/messages/count_tokens",
       .summary = "Tokens of a conversation",
       .body = &MessagesRequest::count_schema(),
       .reply = "TokenCount",
       .is_anthropic = true},
      {.method = "post",
       .path = "/v1/responses",
       .summary = "Answer a conversation (OpenAI Responses)",
       .body = &ResponsesRequest::schema(),
       .reply = "Response",
       .may_stream = true},
      {.method = "post",
       .path = "/generate",
       .summary = "Continue a text or token ids (SGLang)",
       .body = &GenerateRequest::schema(),
       .reply = "GenerateReply",
       .may_stream = true},
      {.method = "post",
       .path = "/tokenize",
       .summary = "Text or conversation to token ids",
       .body = &TokenizeRequest::schema(),
       .reply = "Tokens"},
      {.method = "post",
       .path = "/apply-template",
       .summary = "The conversation as the model reads it (llama-server)",
       .body = &ConversationFields::schema(),
       .reply = "Text"},
      {.method = "post",
       .path = "/detokenize",
       .summary = "Token ids to text",
       .body = &DetokenizeRequest::schema(),
       .reply = "Text"},
      {.method = "get",
       .path = "/v1/models",
       .summary = "The model that is served, by all its names",
       .reply = "Models"},
      {.method = "get",
       .path = "/v1/models/{id}",
       .summary = "The model by one of its names",
       .reply = "Model"},
      {.method = "get",
       .path = "/version",
       .summary = "The program's version",
       .reply = "Version",
       .needs_key = false},
      {.method = "get",
       .path = "/get_model_info",
       .summary = "The model that is served (SGLang)",
       .reply = "ModelInfo"},
      {.method = "get",
       .path = "/server_info",
       .summary = "The server's settings and state",
       .reply = "ServerInfo"},
      {.method = "get",
       .path = "/props",
       .summary = "The model and its defaults (llama-server)",
       .reply = "Properties"},
  };
  json::object document{{"openapi", "3.1.0"},
                        {"info", {{"title", "Fathom"}, {"version", version}}},
                        {"paths", json::object()},
                        {"components", {{"schemas", reply_schemas()}}}};
  for (const Operation& operation : operations) add_operation(operation, limits, document);
  return document;
}

}  // namespace fathom
