#include "router/error_reply.h"

#include "base/json.h"
#include "base/utf8.h"
#include "server/http/error_body.h"
#include "server/http/sse.h"

namespace fathom::router {
namespace {

std::string anthropic_body(int status, std::string_view message) {
  return json::serialize(json::value{{"type", "error"},
                                     {"error",
                                      {{"type", status == 503 ? "overloaded_error" : "api_error"},
                                       {"message", json::string(replace_ill_formed(message))}}}});
}

}  // namespace

ErrorForm error_form(std::string_view path) {
  if (path.starts_with("/v1/messages")) return ErrorForm::kAnthropic;
  if (path.starts_with("/v1/responses")) return ErrorForm::kResponses;
  return ErrorForm::kOpenAi;
}

http::Response error_reply(ErrorForm form, int status, std::string_view message,
                           std::string_view code) {
  http::Response response = http::error_response(status, message, code);
  if (form == ErrorForm::kAnthropic) response.body = anthropic_body(status, message);
  return response;
}

std::string error_event(ErrorForm form, std::string_view message) {
  std::string out;
  switch (form) {
    case ErrorForm::kAnthropic:
      http::append_sse_event(out, "error", anthropic_body(502, message));
      break;
    case ErrorForm::kResponses:
      http::append_sse_event(
          out, "error",
          json::serialize(json::value{{"type", "error"},
                                      {"code", "server_error"},
                                      {"message", json::string(replace_ill_formed(message))},
                                      {"param", nullptr}}));
      break;
    case ErrorForm::kOpenAi:
      http::append_sse_event(out, {},
                             http::error_body(message, http::error_type(502), {}, "replica_lost"));
      break;
  }
  return out;
}

}  // namespace fathom::router
