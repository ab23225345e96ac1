// The gauges that a replica's /metrics has about its load, by the names of vLLM and SGLang.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace fathom::router {

struct ReplicaLoad {
  int64_t running = 0, waiting = 0;  // requests, all ranks together
  double cache_use = 0;              // share of the KV cache in use, of the fullest rank
};

// `page`: text in Prometheus' format. None if it has neither running nor waiting requests.
std::optional<ReplicaLoad> parse_load(std::string_view page);

}  // namespace fathom::router
