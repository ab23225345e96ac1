#include "server/http/dispatcher.h"

#include <algorithm>
#include <utility>

#include "server/http/error_body.h"
#include "server/http/log_text.h"

namespace fathom::http {
namespace {

// Returns the value of the Allow field.
std::string allow_list(const std::vector<Method>& methods) {
  std::string list;
  for (const Method method : methods) {
    list.append(name_of(method)).append(", ");
    if (method == Method::kGet) list.append("HEAD, ");
  }
  return list + "OPTIONS";
}

// Returns whether HTTP defines the method: others get 501 instead of 405.
bool is_known(std::string_view method) {
  constexpr std::string_view kKnown[] = {"GET",   "HEAD",  "POST",    "PUT",     "DELETE",
                                         "PATCH", "TRACE", "CONNECT", "OPTIONS", "QUERY"};
  return std::find(std::begin(kKnown), std::end(kKnown), method) != std::end(kKnown);
}

Response refuse_method(const RequestHead& head, const Target& target,
                       const std::vector<Method>& methods) {
  if (!is_known(head.method)) {
    return error_response(501,
                          fmt::format("the method '{}' is not known", for_log(head.method, 32)));
  }
  if (methods.empty()) {
    return error_response(404, fmt::format("there is nothing at {}", for_log(target.path)),
                          "path_not_found");
  }
  Response response = error_response(405,
                                     fmt::format("{} is not allowed at {}: use {}", head.method,
                                                 for_log(target.path), allow_list(methods)),
                                     "method_not_allowed");
  response.headers.add("Allow", allow_list(methods));
  return response;
}

std::optional<Response> refuse_key(KeyRing::Verdict verdict) {
  const auto unauthenticated = [](std::string_view message) {
    Response response = error_response(401, message, "invalid_api_key");
    response.headers.add("WWW-Authenticate", "Bearer");
    return response;
  };
  switch (verdict) {
    case KeyRing::Verdict::kGranted:
      return std::nullopt;
    case KeyRing::Verdict::kMissing:
      return unauthenticated(
          "no API key was given: send 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'");
    case KeyRing::Verdict::kWrong:
      return unauthenticated("the API key is not valid");
    case KeyRing::Verdict::kNotAdmin:
      return error_response(403, "this needs an admin key; the API key is not one", "not_admin");
    case KeyRing::Verdict::kAdminOff:
      return error_response(403, "this needs an admin key, and the server was started without any",
                            "admin_off");
  }
  return std::nullopt;
}

// Returns "Application/JSON" for "Application/JSON; charset=utf-8".
std::string_view media_type(std::string_view field) {
  const std::string_view type = field.substr(0, field.find(';'));
  return type.substr(0, type.find_last_not_of(" \t") + 1);
}

// Refuses content codings and wrong media types. A body without a type is refused too: a page's
// form and a fetch() without preflight can send either.
std::optional<Response> refuse_content(const RequestHead& head, const RouteOptions& route) {
  if (!head.has_body) return std::nullopt;
  const std::string* coding = head.headers.find("Content-Encoding");
  if (coding != nullptr && !equal_ignoring_case(*coding, "identity")) {
    Response response =
        error_response(415,
                       fmt::format("Content-Encoding '{}' is not supported: send the body as it is",
                                   for_log(*coding, 64)),
                       "unsupported_content_encoding");
    response.headers.add("Accept-Encoding", "identity");
    return response;
  }
  if (!route.wants_json) return std::nullopt;
  const std::string* type = head.headers.find("Content-Type");
  if (type != nullptr && equal_ignoring_case(media_type(*type), "application/json")) {
    return std::nullopt;
  }
  return error_response(
      415,
      fmt::format("the Content-Type {}: send 'Content-Type: application/json'",
                  type == nullptr ? "is missing" : "is '" + for_log(*type, 64) + "'"),
      "unsupported_content_type");
}

bool is_header_list(std::string_view text) {
  constexpr size_t kLongest = 1024;
  const auto allowed = [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '-' ||
           c == '_' || c == ',' || c == ' ';
  };
  return text.size() <= kLongest && std::all_of(text.begin(), text.end(), allowed);
}

}  // namespace

Dispatcher::Dispatcher(const RouteTable& routes, KeyRing keys, BrowserGuard guard)
    : routes_(routes), keys_(std::move(keys)), guard_(std::move(guard)) {}

Dispatcher::Decision Dispatcher::decide(const RequestHead& head, bool draining) const {
  Decision decision;
  auto target = parse_target(head.target);
  if (!target) {
    decision.refusal = error_response(target.error());
    return decision;
  }
  decision.target = std::move(*target);
  if ((decision.refusal = guard_.refuse_host(head.headers))) return decision;
  if (head.method == "OPTIONS" && decision.target.path == "*") {
    decision.refusal = answer_options(head, {Method::kGet, Method::kPost});
    return decision;
  }
  RouteTable::Match match = routes_.find(head.method, decision.target.segments);
  if (match.route == nullptr) {
    decision.refusal = head.method == "OPTIONS" && !match.allowed.empty()
                           ? answer_options(head, match.allowed)
                           : refuse_method(head, decision.target, match.allowed);
    return decision;
  }
  decision.refusal = guard_.refuse_origin(head);
  if (!decision.refusal) {
    decision.refusal = refuse_key(keys_.check(match.route->access, head.headers, &decision.caller));
  }
  if (!decision.refusal) decision.refusal = refuse_content(head, match.route->options);
  if (!decision.refusal && draining && !match.route->options.while_draining) {
    decision.refusal = error_response(503, "the server is shutting down", "shutting_down");
    decision.refusal->headers.add("Retry-After", "5");
  }
  decision.route = match.route;
  decision.path_parameters = std::move(match.path_parameters);
  return decision;
}

// Needs no key: a browser's preflight carries none, and the response tells no more than a 405.
Response Dispatcher::answer_options(const RequestHead& head,
                                    const std::vector<Method>& methods) const {
  Response response{.status = 204, .content_type = "", .headers = {{"Allow", allow_list(methods)}}};
  const std::string* wanted = head.headers.find("Access-Control-Request-Method");
  if (wanted == nullptr || cors_origin(head.headers).empty()) return response;
  response.headers.add("Access-Control-Allow-Methods", allow_list(methods));
  const std::string* fields = head.headers.find("Access-Control-Request-Headers");
  if (fields != nullptr && is_header_list(*fields)) {
    response.headers.add("Access-Control-Allow-Headers", *fields);
  }
  response.headers.add("Access-Control-Max-Age", "600");
  return response;
}

}  // namespace fathom::http
