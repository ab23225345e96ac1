// Error responses in OpenAI's shape: {"error":{"message":…,"type":…,"param":…|null,"code":…|null}}.
#pragma once

#include <string>
#include <string_view>

#include "base/status.h"
#include "server/http/message.h"

namespace fathom::http {

// Returns the body. Empty `param` and `code` become null, ill-formed UTF-8 becomes U+FFFD.
std::string error_body(std::string_view message, std::string_view type, std::string_view param = {},
                       std::string_view code = {});

// Returns "invalid_request_error" for 400, "authentication_error" for 401, …, "server_error" for
// 500 and above.
std::string_view error_type(int status);

Response error_response(int status, std::string_view message, std::string_view code = {},
                        std::string_view param = {});

// Uses http_status(status.code) and the status's message; 429 and 503 carry Retry-After: 1.
Response error_response(const Status& status);

}  // namespace fathom::http
