// Requests as handlers see them, and complete responses. Plain data: no sockets, no JSON.
#pragma once

#include <chrono>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

namespace fathom::http {

// Compares ASCII letters case-insensitively.
bool equal_ignoring_case(std::string_view a, std::string_view b);

// Header fields in order of arrival. Names are case-insensitive.
class Headers {
 public:
  struct Field {
    std::string name, value;
  };

  Headers() = default;
  Headers(std::initializer_list<Field> fields) : fields_(fields) {}

  void add(std::string name, std::string value);
  // Returns the first field of that name; null if there is none.
  const std::string* find(std::string_view name) const;
  int64_t count(std::string_view name) const;

  int64_t size() const { return std::ssize(fields_); }
  auto begin() const { return fields_.begin(); }
  auto end() const { return fields_.end(); }

 private:
  std::vector<Field> fields_;
};

// One parameter of the query (?name=value&…) or of the path (one {name} of a route's pattern),
// percent-decoded.
struct Parameter {
  std::string name, value;
};

// The caller's identity, from the keys that the request presented. On a server without keys all
// callers are equal.
struct Caller {
  int64_t key = -1;       // index of the server's key, API keys first; -1: none
  bool is_admin = false;  // presented one of ServerOptions::admin_keys

  // Returns whether the caller may abort or change what `owner` created.
  bool may_touch(const Caller& owner) const { return is_admin || key == owner.key; }
};

struct Request {
  // The client's X-Request-Id if it is valid (request_id.h), otherwise generated. Sent in the
  // response's X-Request-Id and logged.
  std::string id;
  // "GET", …; a handler of GET also gets "HEAD" and need not distinguish them.
  std::string method;
  // As received, without the query: safe characters and valid %XX only, no "." or ".." segment.
  std::string path;
  std::vector<Parameter> path_parameters;
  std::vector<Parameter> query;  // '+' decodes to a space
  Headers headers;               // at most ServerOptions::max_headers
  // At most ServerOptions::max_body_bytes; UTF-8 is not checked.
  std::string body;
  Caller caller;     // not filled on public routes
  std::string peer;  // "127.0.0.1:40112", "[::1]:40112"
  // Arrival of the last byte; latencies are measured from here.
  std::chrono::steady_clock::time_point received;

  // Returns the first parameter of that name; null if there is none.
  const std::string* path_parameter(std::string_view name) const;
  const std::string* query_parameter(std::string_view name) const;
};

// A complete response. The server adds Content-Length, Date, Connection, X-Request-Id and the CORS
// fields. Control characters in a header's value are sent as spaces.
struct Response {
  int status = 200;
  std::string content_type = "application/json";  // empty: not sent
  Headers headers = {};
  std::string body = {};
};

// Returns "Not Found" for 404; "Unknown" for a status that is not listed.
std::string_view reason_phrase(int status);

}  // namespace fathom::http
