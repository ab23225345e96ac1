// Sends a workload to a server and records the times of its replies.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "base/json.h"
#include "cli/bench_workload.h"
#include "cli/serving_report.h"
#include "server/client/http_client.h"

namespace fathom {

struct ServerLoad {
  std::string endpoint = "/v1/completions";  // or /v1/chat/completions
  std::string api_key, model;
  double temperature = 0;
  json::object extra;  // further fields of each body, which take precedence
  bool ignore_eos = false;
  int64_t max_concurrency = 0;  // 0: no limit
  double cancel_delay_seconds = 0;
  bool show_progress = true;
};

struct LoadRun {
  std::chrono::steady_clock::time_point begin;
  double seconds = 0;
  std::vector<ServedRequest> completed;
  int64_t cancelled = 0;
  std::map<std::string, int64_t> failures;  // count by error message
  int64_t failed = 0;
  int64_t peak_concurrency = 0;
};

// Sends each request at its time, or later if max_concurrency delays it, and waits until all have
// ended. A request that the server refuses or breaks off is counted, not an error.
LoadRun run_load(client::HttpClient& client, const std::vector<LoadRequest>& workload,
                 const ServerLoad& options);

}  // namespace fathom
