// Errors in the shape that clients of OpenAI's interface expect:
// {"error":{"message":…,"type":…,"param":…|null,"code":…|null}}.
#pragma once

#include <string>
#include <string_view>

#include "base/status.h"
#include "server/http/message.h"

namespace fathom::http {

// The body alone. `param` and `code` are null where empty. Ill-formed UTF-8 becomes U+FFFD.
std::string error_body(std::string_view message, std::string_view type, std::string_view param = {},
                       std::string_view code = {});

// "invalid_request_error" for 400, "authentication_error" for 401, …, "server_error" from 500 on.
std::string_view error_type(int status);

Response error_response(int status, std::string_view message, std::string_view code = {},
                        std::string_view param = {});

// http_status(status.code) and its sentence; 429 and 503 say Retry-After: 1.
Response error_response(const Status& status);

}  // namespace fathom::http
