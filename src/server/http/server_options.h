// The server's options with their default limits.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace fathom::http {

struct ServerOptions {
  using Milliseconds = std::chrono::milliseconds;

  std::string host = "127.0.0.1";  // name or address, IPv4 or IPv6 ("::1" or "[::1]")
  int port = 8000;                 // 0: any free port, see Server::port()

  // PEM files, both or neither. If given, the server speaks only TLS (1.2 and later).
  std::string tls_certificate_file = {};  // certificate with its chain
  std::string tls_key_file = {};

  // Accepted as "Authorization: Bearer KEY" and as "X-Api-Key: KEY". If empty, see Access.
  std::vector<std::string> api_keys = {};
  std::vector<std::string> admin_keys = {};

  // Origins allowed by CORS ("https://chat.example"), or "*" for all. If empty, only this server's
  // own pages.
  std::vector<std::string> cors_origins = {};
  // Additional names accepted in the Host field ("chat.example"), or "*" for all (browser_guard.h).
  std::vector<std::string> allowed_hosts = {};

  int io_threads = 1;
  int worker_threads = 1;  // threads that run handlers, see RunOn

  int64_t max_connections = 4096;            // more: 503 and close
  int64_t max_header_bytes = 16 << 10;       // request line and headers; more: 431 (414)
  int64_t max_headers = 100;                 // fields; more: 431
  int64_t max_body_bytes = 32 << 20;         // more: 413
  int64_t max_total_body_bytes = 1ll << 30;  // sum of bodies being received; more: 503
  // First to last byte of the head, and the TLS handshake. Longer: 408.
  Milliseconds header_timeout{10'000};
  // In each window of body_timeout a body must be complete or grow by min_body_bytes_per_second on
  // average. Otherwise: 408.
  Milliseconds body_timeout{30'000};
  int64_t min_body_bytes_per_second = 1024;
  // Between two requests, and before the first. Longer: close.
  Milliseconds idle_timeout{75'000};
  // A response is aborted if for stall_timeout more than send_buffer_bytes stay unsent or the
  // kernel accepts nothing.
  int64_t send_buffer_bytes = 1 << 20;
  Milliseconds stall_timeout{60'000};
  // A stream with more unsent bytes is aborted at once.
  int64_t max_unsent_bytes = 16 << 20;
  // How long to wait for the client to close after the last response, and for the TLS handshake of
  // a client above max_connections.
  Milliseconds linger_timeout{2'000};

  // Interval of the checks for time limits. Every limit except header_timeout may be exceeded by
  // this much.
  Milliseconds check_interval{1'000};

  // How long writes to streams may wait to be sent together. The first write after a pause is sent
  // at once. 0: each write is sent as soon as possible.
  Milliseconds write_delay{1};

  bool access_log = true;  // one line per request
};

}  // namespace fathom::http
