// What a JSON schema may say. XGrammar overlooks keywords that it cannot enforce, and those beside
// others that it takes alone; an answer would then not validate. Here they are refused by name.
#pragma once

#include <string>
#include <string_view>

#include "base/status.h"

namespace fathom {

// The schema, checked, as the text that XGrammar reads. Errors name the keyword and where it
// stands ("json_schema at /properties/a: …").
Result<std::string> check_schema(std::string_view schema);

}  // namespace fathom
