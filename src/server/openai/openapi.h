// Builds the OpenAPI 3.1 document from the tables that check requests.
#pragma once

#include <string_view>

#include "base/json.h"
#include "server/openai/schema.h"

namespace fathom {

// Returns the JSON Schema of one table. Nested tables become references to "#/components/schemas/…"
// and are added to `components`. A request that breaks the schema is refused. One that follows it
// may still be refused with an error that names the field: string lengths are limited in bytes here
// and characters there, and fields may exclude each other.
json::object json_schema_of(const ObjectSchema& schema, const RequestLimits& limits,
                            json::object& components);

struct Operation {
  std::string_view method;   // "get"
  std::string_view path;     // "/v1/models/{id}"
  std::string_view summary;  // one line
  const ObjectSchema* body = nullptr;
  std::string_view reply = {};  // name in reply_schemas.h; empty: see `content_type`
  std::string_view content_type = "application/json";
  bool may_stream = false;  // server-sent events on request
  bool needs_key = true;
  bool is_anthropic = false;  // its errors have Anthropic's shape, except the transport's
  bool is_missing = false;    // always 404: clients of other servers call it
};

// Adds the operation to the document's paths, with every status that it can return.
void add_operation(const Operation& operation, const RequestLimits& limits, json::object& document);

// Returns the document of this folder's endpoints; the caller adds others.
json::object openapi_document(std::string_view version, const RequestLimits& limits);

}  // namespace fathom
