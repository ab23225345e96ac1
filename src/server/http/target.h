// The request target: "/v1/models?limit=3" taken apart. Own code, because what is decoded here
// decides which route, and with it whose key, a request needs; fuzzed in fuzz/http_target_fuzz.cc.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "server/http/message.h"

namespace fathom::http {

struct Target {
  std::string path;                   // without the query, as it came; "*" for OPTIONS *
  std::vector<std::string> segments;  // between the path's slashes, decoded: "/" has one, empty
  std::vector<Parameter> query;
};

inline constexpr int64_t kMaxQueryParameters = 100;

// Takes "/path?query", "http://host/path?query" (whose host is ignored) and "*". Errors
// (kInvalidArgument): characters that a target may not have, a bad %XX, a decoded part that is not
// UTF-8 or holds a control character, a segment that is "." or "..", too many parameters.
Result<Target> parse_target(std::string_view target);

}  // namespace fathom::http
