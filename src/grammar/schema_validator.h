// Whether a JSON value is what a schema says, for the part of JSON Schema that the tests use.
// Test code only.
#pragma once

#include <string>

#include "base/json.h"

namespace fathom {

// Empty: it is. Otherwise what is wrong and where. Properties that the schema does not name are
// wrong unless additionalProperties allows them.
std::string what_is_wrong(const json::value& value, const json::value& schema,
                          const json::value& root, const std::string& path = "");

}  // namespace fathom
