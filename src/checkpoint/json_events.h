// JSON as a stream of events. For files whose tree would be many times their size (a shard header
// may have 100 MB) and whose duplicate keys must be detected: a JSON tree keeps only one.
#pragma once

#include <cstdint>
#include <string_view>

#include "base/status.h"

namespace fathom {

// Handlers for the events. A returned error stops the reading and is its result.
class JsonEvents {
 public:
  virtual ~JsonEvents() = default;
  virtual Result<> begin_object() = 0;
  virtual Result<> end_object() = 0;
  virtual Result<> begin_array() = 0;
  virtual Result<> end_array() = 0;
  virtual Result<> key(std::string_view text) = 0;
  virtual Result<> string(std::string_view text) = 0;
  virtual Result<> integer(int64_t value) = 0;
  // true, false, null, a fraction, or a number outside int64; `what` names it for an error.
  virtual Result<> other(std::string_view what) = 0;
};

// Reads all of `text`, which must be one JSON value in valid UTF-8, nested at most max_depth deep.
// `source` begins syntax errors; errors of `events` are returned unchanged.
Result<> stream_json(std::string_view text, std::string_view source, int max_depth,
                     JsonEvents& events);

}  // namespace fathom
