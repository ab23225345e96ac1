// The router's options with their defaults.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "router/circuit_breaker.h"
#include "router/policy.h"
#include "server/client/http_client.h"
#include "server/http/server_options.h"

namespace fathom::router {

struct RouterOptions {
  http::ServerOptions http;
  std::vector<client::Endpoint> replicas;
  // Sent to replicas as a bearer token instead of the client's key; empty: the client's is passed
  // on.
  std::string replica_api_key;

  PolicyOptions policy;
  std::string session_header = "X-Session-Id";
  int64_t max_tree_bytes = 64 << 20;

  int64_t max_retries = 3;  // further replicas that are asked before the first byte of a reply
  std::chrono::nanoseconds connect_timeout = std::chrono::seconds(5);
  std::chrono::nanoseconds stream_timeout = std::chrono::seconds(300);    // silence within a reply
  std::chrono::nanoseconds request_timeout = std::chrono::seconds(1800);  // 0: none

  BreakerOptions breaker;
  std::chrono::nanoseconds poll_interval = std::chrono::seconds(2);
  std::chrono::nanoseconds poll_timeout = std::chrono::seconds(5);
  int64_t poll_failure_threshold = 3;  // in a row

  bool log_requests = true;
};

}  // namespace fathom::router
