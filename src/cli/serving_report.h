// The report of a serving benchmark, with exactly vLLM's and SGLang's labels and JSON names,
// because scripts parse them.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"

namespace fathom {

// A completed request.
struct ServedRequest {
  std::chrono::steady_clock::time_point submitted;
  std::vector<std::chrono::steady_clock::time_point> token_times;  // arrival of each piece
  int64_t input_tokens = 0, output_tokens = 0;
  int64_t cached_tokens = 0;    // input tokens found in a cache
  int64_t accepted_tokens = 0;  // output tokens that were drafts of speculation
};

// Latency limits in milliseconds that a request must meet to count towards goodput; none: no limit.
struct ServiceGoals {
  std::optional<double> ttft, tpot, e2el;
  bool any() const { return ttft || tpot || e2el; }
};

struct ServingFigures {
  double seconds = 0;
  int64_t completed = 0, failed = 0, cancelled = 0;
  int64_t input_tokens = 0, output_tokens = 0, cached_tokens = 0, accepted_tokens = 0;
  double peak_output_rate = 0;   // tokens in the best second
  int64_t peak_concurrency = 0;  // maximum of requests sent and not ended
  std::optional<int64_t> good;   // requests that met all goals, if there are goals
  // Milliseconds, one entry per request (itl: one per piece except the first).
  std::vector<double> ttft, tpot, itl, e2el;

  double per_second(int64_t count) const { return static_cast<double>(count) / seconds; }
};

// The figures of completed requests. The caller sets failed, cancelled and peak_concurrency.
ServingFigures measure_serving(const std::vector<ServedRequest>& requests,
                               std::chrono::steady_clock::time_point begin, double seconds,
                               const ServiceGoals& goals);

struct ServingReportOptions {
  std::string request_rate = "inf";
  int64_t max_concurrency = 0;  // 0: no limit
  std::vector<std::string> metrics = {"ttft", "tpot", "itl", "e2el"};
  std::vector<double> percentiles = {99};
};

void print_serving_report(const ServingFigures& figures, const ServingReportOptions& options);
void add_serving_figures(const ServingFigures& figures, const ServingReportOptions& options,
                         json::object& object);

}  // namespace fathom
