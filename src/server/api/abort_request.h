// POST /abort_request: {"rid": "…"} or {"abort_all": true}, as SGLang takes it.
#pragma once

#include <string>
#include <string_view>

#include "server/openai/schema.h"

namespace fathom {

struct AbortRequest {
  std::string rid;  // of a request's X-Request-Id or of its answer
  bool abort_all = false;

  static const ObjectSchema& schema();
};

// The id to abort; empty: all.
ApiResult<std::string> read_abort_target(std::string_view body, const RequestLimits& limits);

}  // namespace fathom
