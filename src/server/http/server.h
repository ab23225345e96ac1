// An HTTP/1.1 server: connections, limits, access, answers. It knows nothing of what is served.
//
//   create()      checks the options, reads the certificate
//   listen()      binds; from here on clients can connect and wait
//   start()       the I/O threads and the workers begin
//   begin_drain() new requests get 503 with Retry-After, what runs goes on, connections close
//                 after their answer
//   stop(grace)   drains for at most that long, cuts what is left, joins all threads
//
// All methods may be called from any thread, except that handlers and callbacks must not call
// stop() or destroy the server. One line a request goes to the log: id, peer, method, path, status,
// bytes, ms; nothing of a body, a query or a key.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "base/status.h"
#include "server/http/route_table.h"
#include "server/http/server_options.h"

namespace fathom::http {

struct ServerStats {
  int64_t connections = 0;         // open now
  int64_t requests_in_flight = 0;  // complete and not yet answered to the end
  int64_t connections_accepted = 0, connections_refused = 0;  // refused: above max_connections
  int64_t responses[6] = {};                   // [4]: answers begun with a status 4xx; [0] unused
  int64_t closed_by_client = 0, cut_off = 0;   // answers that were not delivered to their end
  int64_t bytes_received = 0, bytes_sent = 0;  // within TLS, if there is any
};

class Server {
 public:
  static Result<std::unique_ptr<Server>> create(ServerOptions options, RouteTable routes);
  ~Server();  // stop() without grace
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  Result<> listen();  // an error names host and port
  int port() const;   // after listen(): the port that was bound
  const RouteTable& routes() const;

  void start();
  void begin_drain();
  // True if every request was answered within the grace. A second call, with a shorter grace from
  // another thread, shortens the first.
  bool stop(std::chrono::nanoseconds grace);

  ServerStats stats() const;

 private:
  struct Parts;
  explicit Server(std::unique_ptr<Parts> parts);
  std::unique_ptr<Parts> parts_;
};

}  // namespace fathom::http
