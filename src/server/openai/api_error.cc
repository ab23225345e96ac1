#include "server/openai/api_error.h"

#include "server/openai/json_writer.h"

namespace fathom {
namespace {

std::string_view openai_type(int status) {
  switch (status) {
    case 401:
    case 403:
      return "authentication_error";
    case 404:
      return "not_found_error";
    case 429:
      return "rate_limit_error";
    case 503:
      return "unavailable_error";
    default:
      return status < 500 ? "invalid_request_error" : "server_error";
  }
}

std::string_view anthropic_type(int status) {
  switch (status) {
    case 401:
      return "authentication_error";
    case 403:
      return "permission_error";
    case 404:
      return "not_found_error";
    case 413:
      return "request_too_large";
    case 429:
      return "rate_limit_error";
    case 503:
      return "overloaded_error";
    default:
      return status < 500 ? "invalid_request_error" : "api_error";
  }
}

std::optional<std::string> code_of(Code code) {
  switch (code) {
    case Code::kUnauthenticated:
      return "invalid_api_key";
    case Code::kTooLarge:
      return "request_too_large";
    case Code::kResourceExhausted:
      return "queue_full";
    case Code::kDeadlineExceeded:
      return "deadline_exceeded";
    case Code::kInternal:
      return "internal_error";
    case Code::kUnavailable:
      return "unavailable";
    case Code::kInvalidArgument:
    case Code::kNotFound:
      return std::nullopt;
  }
  return std::nullopt;
}

}  // namespace

ApiError::ApiError(int http_status, std::string text, std::optional<std::string> field,
                   std::optional<std::string> name)
    : status(http_status),
      message(std::move(text)),
      type(openai_type(http_status)),
      param(std::move(field)),
      code(std::move(name)) {}

ApiError::ApiError(const Status& from)
    : ApiError(fathom::http_status(from.code), from.message, std::nullopt, code_of(from.code)) {}

std::string ApiError::to_json(ErrorShape shape) const {
  std::string out;
  JsonWriter json(out);
  json.open('{');
  if (shape == ErrorShape::kAnthropic) {
    json.field("type", "error").key("error").open('{').field("type", anthropic_type(status));
    json.field("message", message);
  } else {
    json.key("error").open('{').field("message", message).field("type", type);
    json.field("param", param).field("code", code);
  }
  json.close('}').close('}');
  return out;
}

}  // namespace fathom
