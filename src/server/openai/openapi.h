// The OpenAPI 3.1 document of these endpoints, from the tables that check their requests.
#pragma once

#include <string_view>

#include "base/json.h"
#include "server/openai/schema.h"

namespace fathom {

// The JSON Schema of one table, as a document of its own would have it: nested tables are
// references to "#/components/schemas/…" and are added to `components`.
json::object json_schema_of(const ObjectSchema& schema, const RequestLimits& limits,
                            json::object& components);

// GET /openapi.json. The transport adds the paths that are its own.
json::object openapi_document(std::string_view version, const RequestLimits& limits);

}  // namespace fathom
