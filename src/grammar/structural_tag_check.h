// What an XGrammar structural tag may say: text with parts in it that follow schemas, regular
// expressions or grammars. Each part has the limits that it has by itself.
#pragma once

#include <string_view>

#include "base/status.h"

namespace fathom {

// Errors name the place ("structural_tag at /format/elements/0: …"). What is between the parts is
// left to XGrammar, whose reader checks it.
Result<> check_structural_tag(std::string_view text);

}  // namespace fathom
