// The router's metrics in the Prometheus text format. Used on the router's thread only.
#pragma once

#include <cstdint>
#include <string>

#include "router/replica_set.h"
#include "server/http/server.h"
#include "server/metrics/metrics_text.h"

namespace fathom::router {

struct RouterMetrics {
  RouterMetrics();

  int64_t refused = 0;      // no replica was available
  int64_t disconnects = 0;  // clients that left
  int64_t prompt_bytes = 0,
          prefix_bytes = 0;  // of prompts; and seen by the replica that was chosen
  Histogram dispatch;        // seconds from a request's last byte to its first replica
  Histogram reply;           // seconds from the same to the head of the reply

  std::string text(const ReplicaSet& replicas, int64_t active, const http::ServerStats& http) const;
};

}  // namespace fathom::router
