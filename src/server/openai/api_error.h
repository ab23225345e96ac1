// API errors: an HTTP status and one of two JSON shapes.
#pragma once

#include <optional>
#include <string>
#include <tl/expected.hpp>

#include "base/status.h"

namespace fathom {

enum class ErrorShape {
  kOpenAi,     // {"error":{"message":…,"type":…,"param":…,"code":…}}
  kAnthropic,  // {"type":"error","error":{"type":…,"message":…}}, for /v1/messages
};

struct ApiError {
  int status = 500;
  std::string message;
  std::string type;                       // "invalid_request_error", …
  std::optional<std::string> param = {};  // the field's path: "messages[0].content"
  std::optional<std::string> code = {};   // "context_length_exceeded", …

  ApiError() = default;
  ApiError(int http_status, std::string text, std::optional<std::string> field = {},
           std::optional<std::string> name = {});
  // Converts engine errors: kResourceExhausted becomes "queue_full", and so on.
  ApiError(const Status& from);  // NOLINT(google-explicit-constructor): for FATHOM_TRY

  // Returns the response body.
  std::string to_json(ErrorShape shape = ErrorShape::kOpenAi) const;
};

template <typename T = void>
using ApiResult = tl::expected<T, ApiError>;

// Returns a 400 whose param is the wrong field.
template <typename... Args>
tl::unexpected<ApiError> bad_field(std::string param, fmt::format_string<Args...> format,
                                   Args&&... args) {
  return tl::unexpected(
      ApiError(400, fmt::format(format, std::forward<Args>(args)...), std::move(param)));
}

}  // namespace fathom
