// An error as the answer of any route.
#pragma once

#include "server/http/message.h"
#include "server/openai/api_error.h"

namespace fathom {

// Overload and shutdown pass: 429 and 503 say when to come back. What else goes wrong here will go
// wrong again, and clients that repeat every 5xx are told not to.
http::Response error_response(const ApiError& error, ErrorShape shape = ErrorShape::kOpenAi);

}  // namespace fathom
