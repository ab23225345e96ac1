// What the answers look like: JSON Schemas for the OpenAPI document. The tests of the official
// clients and of the document hold the replies to them.
#pragma once

#include "base/json.h"

namespace fathom {

// Name to schema; they refer to each other as "#/components/schemas/NAME".
const json::object& reply_schemas();

}  // namespace fathom
