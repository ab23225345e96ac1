// Escapes untrusted text for the log: one line, no terminal escape sequences.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace fathom::http {

// Keeps visible ASCII and spaces, escapes '"' and '\' with a backslash and writes other bytes as
// \xHH. Text after `longest` bytes is replaced by "...".
std::string for_log(std::string_view text, size_t longest = 200);

}  // namespace fathom::http
