#include "router/request_head.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace fathom::router {
namespace {

bool is_one_of(std::string_view name, std::initializer_list<std::string_view> names) {
  return std::any_of(names.begin(), names.end(), [&](std::string_view other) {
    return http::equal_ignoring_case(name, other);
  });
}

bool is_of_connection(std::string_view name) {
  return is_one_of(name, {"Connection", "Keep-Alive", "Proxy-Connection", "Proxy-Authenticate",
                          "Proxy-Authorization", "TE", "Trailer", "Transfer-Encoding", "Upgrade",
                          "Content-Length", "X-Request-Id"});
}

void append_encoded(std::string& out, std::string_view text) {
  for (const char c : text) {
    const bool plain = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
                       c == '-' || c == '.' || c == '_' || c == '~';
    if (plain) {
      out += c;
    } else {
      out += fmt::format("%{:02X}", static_cast<unsigned char>(c));
    }
  }
}

// A field's value cannot end the head early, whatever it holds.
void append_field(std::string& out, std::string_view name, std::string_view value) {
  out.append(name).append(": ");
  for (const char c : value) out += c == '\r' || c == '\n' || c == '\0' ? ' ' : c;
  out += "\r\n";
}

}  // namespace

std::string request_head(const http::Request& request, std::string_view host,
                         std::string_view api_key) {
  // The front answers HEAD like GET, without the body.
  std::string out = request.method == "HEAD" ? "GET" : request.method;
  out.append(" ").append(request.path);
  char separator = '?';
  for (const http::Parameter& parameter : request.query) {
    out += std::exchange(separator, '&');
    append_encoded(out, parameter.name);
    out += '=';
    append_encoded(out, parameter.value);
  }
  out += " HTTP/1.1\r\n";
  append_field(out, "Host", host);
  for (const auto& [name, value] : request.headers) {
    // The front has checked Host and Origin; a replica's own check is for its own pages.
    if (is_of_connection(name) || is_one_of(name, {"Host", "Origin", "Expect"})) continue;
    if (!api_key.empty() && is_one_of(name, {"Authorization", "X-Api-Key"})) continue;
    append_field(out, name, value);
  }
  if (!api_key.empty()) append_field(out, "Authorization", fmt::format("Bearer {}", api_key));
  append_field(out, "X-Request-Id", request.id);
  if (!request.body.empty() || request.method == "POST" || request.method == "PUT") {
    append_field(out, "Content-Length", std::to_string(request.body.size()));
  }
  return out + "\r\n";
}

http::Headers reply_headers(const http::Headers& headers) {
  http::Headers kept;
  for (const auto& [name, value] : headers) {
    if (is_of_connection(name) || is_one_of(name, {"Content-Type", "Date", "Vary"})) continue;
    if (http::equal_ignoring_case(name.substr(0, 15), "Access-Control-")) continue;
    kept.add(name, value);
  }
  return kept;
}

}  // namespace fathom::router
