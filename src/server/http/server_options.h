// Everything about the server that can be set, with the limits that are shipped as defaults.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace fathom::http {

struct ServerOptions {
  using Milliseconds = std::chrono::milliseconds;

  std::string host = "127.0.0.1";  // a name or an address, IPv4 or IPv6 ("::1" or "[::1]")
  int port = 8000;                 // 0: any that is free; Server::port() says which

  // PEM files, both or neither: with them the server speaks TLS (1.2 and later) only.
  std::string tls_certificate_file = {};  // with its chain
  std::string tls_key_file = {};

  // Accepted as "Authorization: Bearer KEY" and as "X-Api-Key: KEY". None: see Access.
  std::vector<std::string> api_keys = {};
  std::vector<std::string> admin_keys = {};

  // Origins whose pages may call ("https://chat.example"), or "*" for all; none: this server's
  // only.
  std::vector<std::string> cors_origins = {};
  // Further names that a Host field may have ("chat.example"), or "*" for all (browser_guard.h).
  std::vector<std::string> allowed_hosts = {};

  int io_threads = 1;
  int worker_threads = 1;  // for handlers, see RunOn

  int64_t max_connections = 4096;            // beyond it: 503 and close
  int64_t max_header_bytes = 16 << 10;       // request line and headers; beyond it: 431 (414)
  int64_t max_headers = 100;                 // fields; beyond it: 431
  int64_t max_body_bytes = 32 << 20;         // beyond it: 413
  int64_t max_total_body_bytes = 1ll << 30;  // of all bodies still arriving; beyond it: 503
  Milliseconds header_timeout{10'000};       // first to last byte of the head, and TLS: 408
  Milliseconds body_timeout{30'000};         // in each such time the body must be completed, or
  int64_t min_body_bytes_per_second = 1024;  // gain this much for each second of it: 408
  Milliseconds idle_timeout{75'000};         // between two requests, and before the first: close
  int64_t send_buffer_bytes = 1 << 20;       // an answer with more than this unsent, or of which
  Milliseconds stall_timeout{60'000};        // nothing could be sent, for this long is cut off
  int64_t max_unsent_bytes = 16 << 20;       // a stream with more than this unsent: at once
  Milliseconds linger_timeout{2'000};        // for the client to close after the last answer, and
                                             // for TLS with a client above max_connections

  // How often the time limits are looked at; each, but that of the head, may be exceeded by so
  // much.
  Milliseconds check_interval{1'000};

  // How long writes to streams may wait to be sent together with others; the first one after a
  // pause is sent at once. 0: each is sent as soon as possible.
  Milliseconds write_delay{1};

  bool access_log = true;  // one line a request
};

}  // namespace fathom::http
