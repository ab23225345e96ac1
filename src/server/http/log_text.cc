#include "server/http/log_text.h"

#include <fmt/format.h>

namespace fathom::http {

std::string for_log(std::string_view text, size_t longest) {
  std::string out;
  for (const char c : text.substr(0, longest)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte > 0x7E) {
      out += fmt::format("\\x{:02x}", byte);
    } else {
      if (c == '"' || c == '\\') out.push_back('\\');
      out.push_back(c);
    }
  }
  if (text.size() > longest) out.append("...");
  return out;
}

}  // namespace fathom::http
