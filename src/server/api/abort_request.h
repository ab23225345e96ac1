// POST /abort_request in SGLang's form: {"rid": "…"} or {"abort_all": true}.
#pragma once

#include <string>
#include <string_view>

#include "server/openai/schema.h"

namespace fathom {

struct AbortRequest {
  std::string rid;  // X-Request-Id, or the id in the response
  bool abort_all = false;

  static const ObjectSchema& schema();
};

// Parses and checks a body. Returns the id to abort; empty: all.
ApiResult<std::string> read_abort_target(std::string_view body, const RequestLimits& limits);

}  // namespace fathom
