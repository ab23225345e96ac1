// What a serving benchmark says in the end: vLLM's and SGLang's labels and JSON names, to the
// letter, because scripts read them.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"

namespace fathom {

// One request that came to its end.
struct ServedRequest {
  std::chrono::steady_clock::time_point submitted;
  std::vector<std::chrono::steady_clock::time_point> token_times;  // when each piece came
  int64_t input_tokens = 0, output_tokens = 0;
  int64_t cached_tokens = 0;  // of the input, found in a cache
};

// Limits that a request has to keep in order to be good; milliseconds, none: any.
struct ServiceGoals {
  std::optional<double> ttft, tpot, e2el;
  bool any() const { return ttft || tpot || e2el; }
};

struct ServingFigures {
  double seconds = 0;
  int64_t completed = 0, failed = 0, cancelled = 0;
  int64_t input_tokens = 0, output_tokens = 0, cached_tokens = 0;
  double peak_output_rate = 0;   // tokens in the fullest second
  int64_t peak_concurrency = 0;  // requests sent and not ended
  std::optional<int64_t> good;   // requests that kept all goals, if there are any
  // Milliseconds, one entry a request (itl: one a piece but the first).
  std::vector<double> ttft, tpot, itl, e2el;

  double per_second(int64_t count) const { return static_cast<double>(count) / seconds; }
};

// The figures of completed requests; failed, cancelled and peak_concurrency are the caller's.
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
