// Validates a JSON value against a schema, for the part of JSON Schema that the tests use. Test
// code only.
#pragma once

#include <string>

#include "base/json.h"

namespace fathom {

// Returns what is invalid and where; empty if the value is valid. Properties that the schema does
// not name are invalid unless additionalProperties allows them.
std::string what_is_wrong(const json::value& value, const json::value& schema,
                          const json::value& root, const std::string& path = "");

}  // namespace fathom
