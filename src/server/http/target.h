// Parses request targets such as "/v1/models?limit=3". The parser is our own because decoding
// decides which route, and so which key, a request needs. Fuzzed in fuzz/http_target_fuzz.cc.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "server/http/message.h"

namespace fathom::http {

struct Target {
  std::string path;                   // as received, without the query; "*" for OPTIONS *
  std::vector<std::string> segments;  // path split at slashes, decoded; "/" has one, empty
  std::vector<Parameter> query;
};

inline constexpr int64_t kMaxQueryParameters = 100;

// Parses "/path?query", "http://host/path?query" (the host is ignored) and "*". Errors
// (kInvalidArgument): forbidden characters, a bad %XX, a decoded part that is not UTF-8 or holds a
// control character, a segment "." or "..", more than kMaxQueryParameters.
Result<Target> parse_target(std::string_view target);

}  // namespace fathom::http
