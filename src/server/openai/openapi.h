// The OpenAPI 3.1 document of these endpoints, from the tables that check their requests.
#pragma once

#include <string_view>

#include "base/json.h"
#include "server/openai/schema.h"

namespace fathom {

// The JSON Schema of one table, as a document of its own would have it: nested tables are
// references to "#/components/schemas/…" and are added to `components`. What breaks the schema is
// refused; a request that follows it may still be, with an error that names the field: lengths of
// strings count bytes here and characters there, fields may exclude each other.
json::object json_schema_of(const ObjectSchema& schema, const RequestLimits& limits,
                            json::object& components);

struct Operation {
  std::string_view method;   // "get"
  std::string_view path;     // "/v1/models/{id}"
  std::string_view summary;  // one line
  const ObjectSchema* body = nullptr;
  std::string_view reply = {};  // a name of reply_schemas.h; empty: see `content_type`
  std::string_view content_type = "application/json";
  bool may_stream = false;  // server-sent events if the request says so
  bool needs_key = true;
  bool is_anthropic = false;  // its errors, except those of the transport
  bool is_missing = false;    // always 404: what clients ask for and nothing here serves
};

// Adds it to the document's paths, with every status that it can have.
void add_operation(const Operation& operation, const RequestLimits& limits, json::object& document);

// The document of the endpoints whose bodies are made here; others are added to it.
json::object openapi_document(std::string_view version, const RequestLimits& limits);

}  // namespace fathom
