// HTTP/1.1 server: connections, limits, access, responses. Knows nothing of what is served.
//
//   create()      validates the options and reads the certificate
//   listen()      binds; from here on clients can connect and wait
//   start()       starts I/O threads and workers
//   begin_drain() refuses new requests with 503 and Retry-After, finishes requests in flight,
//   closes
//                 connections after their response
//   stop(grace)   drains for at most `grace`, aborts what is left, joins all threads
//
// Any thread may call, except that handlers and callbacks must not call stop() or destroy the
// server. The access log has one line per request: id, peer, method, path, status, bytes, ms.
// Bodies, queries and keys are never logged.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "base/status.h"
#include "server/http/route_table.h"
#include "server/http/server_options.h"

namespace fathom::http {

struct ServerStats {
  int64_t connections = 0;         // currently open
  int64_t requests_in_flight = 0;  // received completely, response not finished
  int64_t connections_accepted = 0, connections_refused = 0;  // refused: above max_connections
  int64_t responses[6] = {};  // started responses by status class; [4]: 4xx; [0] unused
  int64_t closed_by_client = 0, cut_off = 0;   // responses that were not delivered completely
  int64_t bytes_received = 0, bytes_sent = 0;  // inside TLS, if enabled
};

class Server {
 public:
  static Result<std::unique_ptr<Server>> create(ServerOptions options, RouteTable routes);
  ~Server();  // stop() with zero grace
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // An error names host and port.
  Result<> listen();
  // The bound port. Precondition: listen() succeeded.
  int port() const;
  const RouteTable& routes() const;

  void start();
  void begin_drain();
  // Makes the I/O threads send what responders have written by now. Returns how many have not yet:
  // each does so once, however late, and then what is left waits for its client. Only between
  // start() and stop().
  std::shared_ptr<const std::atomic<int>> flush();
  // Returns true if every request was answered within `grace`. A second call from another thread
  // with a shorter grace shortens the first.
  bool stop(std::chrono::nanoseconds grace);

  ServerStats stats() const;

 private:
  struct Parts;
  explicit Server(std::unique_ptr<Parts> parts);
  std::unique_ptr<Parts> parts_;
};

}  // namespace fathom::http
