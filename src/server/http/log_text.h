// Text from outside in a log line: one line, no escape sequences a terminal would obey.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace fathom::http {

// Everything but visible ASCII and the space as \xHH, '"' and '\' with a backslash; at most
// `longest` bytes of `text`, then "...".
std::string for_log(std::string_view text, size_t longest = 200);

}  // namespace fathom::http
