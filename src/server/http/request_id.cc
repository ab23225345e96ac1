#include "server/http/request_id.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>

#include "base/entropy.h"

namespace fathom::http {

bool is_valid_request_id(std::string_view id) {
  constexpr size_t kLongest = 128;
  const auto allowed = [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '.' ||
           c == '_' || c == '-' || c == ':';
  };
  return !id.empty() && id.size() <= kLongest && std::all_of(id.begin(), id.end(), allowed);
}

std::string make_request_id() {
  return fmt::format("req-{:016x}{:016x}", unpredictable_bits(), unpredictable_bits());
}

}  // namespace fathom::http
