// Converts errors to responses, for all routes.
#pragma once

#include "server/http/message.h"
#include "server/openai/api_error.h"

namespace fathom {

// 429 and 503 are temporary and carry Retry-After. Other 5xx are permanent and carry
// x-should-retry: false, because clients retry every 5xx otherwise.
http::Response error_response(const ApiError& error, ErrorShape shape = ErrorShape::kOpenAi);

}  // namespace fathom
