// JSON Schemas of the responses, for the OpenAPI document. Tests of the document and of the
// official clients check real responses against them.
#pragma once

#include "base/json.h"

namespace fathom {

// Returns schemas by name; they reference each other as "#/components/schemas/NAME".
const json::object& reply_schemas();

}  // namespace fathom
