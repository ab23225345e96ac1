// A request as a handler sees it, and a whole answer. Plain data: no sockets, no JSON.
#pragma once

#include <chrono>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

namespace fathom::http {

// Compares ASCII letters case-insensitively, as for header names and schemes.
bool equal_ignoring_case(std::string_view a, std::string_view b);

// Header fields in the order in which they came. Names are compared without regard to case.
class Headers {
 public:
  struct Field {
    std::string name, value;
  };

  Headers() = default;
  Headers(std::initializer_list<Field> fields) : fields_(fields) {}

  void add(std::string name, std::string value);
  // The first field of that name; null if there is none.
  const std::string* find(std::string_view name) const;
  int64_t count(std::string_view name) const;

  int64_t size() const { return std::ssize(fields_); }
  auto begin() const { return fields_.begin(); }
  auto end() const { return fields_.end(); }

 private:
  std::vector<Field> fields_;
};

// One of ?name=value&…, or one {name} of a route's pattern; percent-decoded.
struct Parameter {
  std::string name, value;
};

// Whose keys a request presented. On a server without keys all callers are equal.
struct Caller {
  int64_t key = -1;       // which of the server's keys, API keys first; -1: none
  bool is_admin = false;  // presented one of ServerOptions::admin_keys

  // Whether it may do something to what `owner` has made.
  bool may_touch(const Caller& owner) const { return is_admin || key == owner.key; }
};

struct Request {
  // From X-Request-Id where that is one (request_id.h), made up otherwise. Goes out in the answer's
  // X-Request-Id and into the access log.
  std::string id;
  std::string method;  // "GET", …; a handler of GET also gets "HEAD" and need not know it
  // As it came, without the query: safe characters and valid %XX only, no "." or ".." segment.
  std::string path;
  std::vector<Parameter> path_parameters;
  std::vector<Parameter> query;  // '+' is a space
  Headers headers;               // at most ServerOptions::max_headers
  std::string body;              // at most ServerOptions::max_body_bytes; bytes, not checked UTF-8
  Caller caller;                 // on routes that are not public
  std::string peer;              // "127.0.0.1:40112", "[::1]:40112"
  // When its last byte had arrived: what latencies are measured from.
  std::chrono::steady_clock::time_point received;

  // The first of that name; null if there is none.
  const std::string* path_parameter(std::string_view name) const;
  const std::string* query_parameter(std::string_view name) const;
};

// A whole answer. Content-Length, Date, Connection, X-Request-Id and the CORS fields are the
// server's; a control character in a header's value goes out as a space.
struct Response {
  int status = 200;
  std::string content_type = "application/json";  // empty: none is sent
  Headers headers = {};
  std::string body = {};
};

// "Not Found"; "Unknown" for a status that has no name here.
std::string_view reason_phrase(int status);

}  // namespace fathom::http
