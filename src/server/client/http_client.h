// HTTP/1.1 client for measuring servers: thousands of concurrent requests on one I/O thread. Each
// request opens its own connection, so that latencies include the connection.
//
// Any thread may call send(). Handlers are called on the I/O thread and must not block it. TLS and
// redirects are not supported.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "base/status.h"

namespace fathom::client {

struct Endpoint {
  std::string host = "127.0.0.1";
  int port = 8000;
};

// Parses "http://HOST:PORT"; the port (80) and a final slash are optional.
Result<Endpoint> parse_base_url(std::string_view url);

struct ClientRequest {
  std::string method = "GET", path = "/";
  std::string api_key = {};  // sent as a bearer token; empty: not sent
  std::string body = {};     // JSON; empty: no body
  // Time after send() at which the connection is closed, whatever has come; none: never.
  std::optional<std::chrono::nanoseconds> time_limit = {};
};

struct ClientReply {
  int status = 0;
  std::string body;  // empty for an event stream
};

class ReplyHandler {
 public:
  virtual ~ReplyHandler() = default;
  // Called for each event of a stream with status 200.
  virtual void on_event(std::string_view data) = 0;
  // Called once, last. Receives a complete response of any status, or an error: kDeadlineExceeded
  // (time limit) or kUnavailable (no connection, or it broke).
  virtual void on_end(Result<ClientReply> reply) = 0;
};

class HttpClient {
 public:
  // Resolves the host. An error names it.
  static Result<std::unique_ptr<HttpClient>> create(const Endpoint& endpoint);
  // Closes all connections; their handlers are not called any more.
  ~HttpClient();
  HttpClient(const HttpClient&) = delete;
  HttpClient& operator=(const HttpClient&) = delete;

  void send(ClientRequest request, std::shared_ptr<ReplyHandler> handler);

  // Sends a request and waits for its reply. Must not be called on the I/O thread.
  Result<ClientReply> ask(ClientRequest request);

 private:
  struct Parts;
  explicit HttpClient(std::unique_ptr<Parts> parts);
  std::unique_ptr<Parts> parts_;
};

}  // namespace fathom::client
