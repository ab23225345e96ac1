// An HTTP/1.1 client for measuring servers: thousands of requests at a time on one I/O thread, each
// on a connection of its own, so that what is measured begins with the connection.
//
// send() may be called from any thread; a handler's methods are called on the I/O thread, which
// they must not block. No TLS and no redirects: it talks to a server that is under test.
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

// "http://HOST:PORT", with or without the port (80) and a last slash.
Result<Endpoint> parse_base_url(std::string_view url);

struct ClientRequest {
  std::string method = "GET", path = "/";
  std::string api_key = {};  // sent as a bearer token; empty: none
  std::string body = {};     // JSON; empty: none
  // The connection is closed so long after send(), whatever has come; none: never.
  std::optional<std::chrono::nanoseconds> time_limit = {};
};

struct ClientReply {
  int status = 0;
  std::string body;  // empty for a stream of events
};

class ReplyHandler {
 public:
  virtual ~ReplyHandler() = default;
  // One event of a stream of them that has status 200.
  virtual void on_event(std::string_view data) = 0;
  // Once, and nothing after it. An answer that came to its end, whatever its status; or
  // kDeadlineExceeded: the time limit; kUnavailable: no connection, or one that broke.
  virtual void on_end(Result<ClientReply> reply) = 0;
};

class HttpClient {
 public:
  // Finds the host's address. An error names it.
  static Result<std::unique_ptr<HttpClient>> create(const Endpoint& endpoint);
  // Closes what is open; its handlers hear nothing more.
  ~HttpClient();
  HttpClient(const HttpClient&) = delete;
  HttpClient& operator=(const HttpClient&) = delete;

  void send(ClientRequest request, std::shared_ptr<ReplyHandler> handler);

  // Sends and waits; not from the I/O thread.
  Result<ClientReply> ask(ClientRequest request);

 private:
  struct Parts;
  explicit HttpClient(std::unique_ptr<Parts> parts);
  std::unique_ptr<Parts> parts_;
};

}  // namespace fathom::client
