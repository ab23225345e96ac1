#include "server/http/error_body.h"

#include "base/json.h"
#include "base/utf8.h"

namespace fathom::http {
namespace {

json::value text_or_null(std::string_view text) {
  if (text.empty()) return nullptr;
  return json::string(replace_ill_formed(text));
}

}  // namespace

std::string error_body(std::string_view message, std::string_view type, std::string_view param,
                       std::string_view code) {
  return json::serialize(json::value{{"error",
                                      {{"message", json::string(replace_ill_formed(message))},
                                       {"type", text_or_null(type)},
                                       {"param", text_or_null(param)},
                                       {"code", text_or_null(code)}}}});
}

std::string_view error_type(int status) {
  switch (status) {
    case 401:
      return "authentication_error";
    case 403:
      return "permission_error";
    case 404:
      return "not_found_error";
    case 429:
      return "rate_limit_error";
    case 503:
      return "unavailable_error";
    default:
      return status >= 500 ? "server_error" : "invalid_request_error";
  }
}

Response error_response(int status, std::string_view message, std::string_view code,
                        std::string_view param) {
  return {.status = status, .body = error_body(message, error_type(status), param, code)};
}

Response error_response(const Status& status) {
  Response response = error_response(http_status(status.code), status.message);
  if (response.status == 429 || response.status == 503) response.headers.add("Retry-After", "1");
  return response;
}

}  // namespace fathom::http
