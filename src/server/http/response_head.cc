#include "server/http/response_head.h"

#include <fmt/format.h>

#include <algorithm>
#include <ctime>

namespace fathom::http {
namespace {

// Returns "Sun, 06 Nov 1994 08:49:37 GMT", independent of the locale. Formatted once per second and
// thread.
std::string_view date() {
  constexpr const char* kDays[] = {"Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat"};
  constexpr const char* kMonths[] = {"Jan", "Feb", "Mar", "Apr", "May", "Jun",
                                     "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"};
  thread_local std::time_t second = 0;
  thread_local std::string text;
  const std::time_t now = std::time(nullptr);
  if (now != second || text.empty()) {
    std::tm utc{};
    gmtime_r(&now, &utc);
    text =
        fmt::format("{}, {:02} {} {} {:02}:{:02}:{:02} GMT", kDays[utc.tm_wday], utc.tm_mday,
                    kMonths[utc.tm_mon], utc.tm_year + 1900, utc.tm_hour, utc.tm_min, utc.tm_sec);
    second = now;
  }
  return text;
}

bool is_control(char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7F; }

void append_field(std::string& out, std::string_view name, std::string_view value) {
  out.append(name).append(": ").append(value);
  std::replace_if(out.end() - std::ssize(value), out.end(), is_control, ' ');
  out.append("\r\n");
}

bool is_servers(std::string_view name) {
  constexpr std::string_view kServers[] = {"Content-Length", "Transfer-Encoding", "Connection",
                                           "Date",           "X-Request-Id",      "Request-Id",
                                           "Content-Type"};
  return std::any_of(std::begin(kServers), std::end(kServers),
                     [&](std::string_view own) { return equal_ignoring_case(own, name); });
}

}  // namespace

void append_response_head(std::string& out, const ResponseHead& head) {
  out += fmt::format("{}{} {}\r\n", kProbe, head.status, reason_phrase(head.status));
  append_field(out, "Date", date());
  if (!head.content_type.empty()) append_field(out, "Content-Type", head.content_type);
  if (head.content_length)
    append_field(out, "Content-Length", std::to_string(*head.content_length));
  if (head.chunked) append_field(out, "Transfer-Encoding", "chunked");
  if (head.close) append_field(out, "Connection", "close");
  if (!head.request_id.empty()) {
    append_field(out, "X-Request-Id", head.request_id);
    append_field(out, "Request-Id", head.request_id);  // the name that Anthropic's clients read
  }
  if (!head.cors_origin.empty()) {
    append_field(out, "Access-Control-Allow-Origin", head.cors_origin);
    append_field(out, "Access-Control-Expose-Headers", "X-Request-Id, Retry-After");
    if (head.cors_origin != "*") append_field(out, "Vary", "Origin");
  }
  for (const Headers::Field& field : head.headers) {
    if (!is_servers(field.name)) append_field(out, field.name, field.value);
  }
  out.append("\r\n");
}

void append_chunk_begin(std::string& out, int64_t size) { out += fmt::format("{:x}\r\n", size); }

}  // namespace fathom::http
