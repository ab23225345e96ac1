// Checks a JSON schema. XGrammar ignores keywords that it cannot enforce, and those beside certain
// others; the output would then not validate. Such schemas are refused here, naming the keyword.
#pragma once

#include <string>
#include <string_view>

#include "base/status.h"

namespace fathom {

// Returns the checked schema as text for XGrammar. Errors name the keyword and its place
// ("json_schema at /properties/a: …").
Result<std::string> check_schema(std::string_view schema);

}  // namespace fathom
