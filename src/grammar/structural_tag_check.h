// Checks an XGrammar structural tag: text with parts that follow schemas, regular expressions or
// grammars. Each part has the limits that it would have on its own.
#pragma once

#include <string_view>

#include "base/status.h"

namespace fathom {

// Errors name the place ("structural_tag at /format/elements/0: …"). XGrammar's parser checks the
// structure around the parts.
Result<> check_structural_tag(std::string_view text);

}  // namespace fathom
