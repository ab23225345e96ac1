// Runs many requests at once and records the time of each token, for evaluations and benchmarks.
#pragma once

#include <chrono>
#include <functional>
#include <vector>

#include "cli/answer.h"

namespace fathom {

using SteadyTime = std::chrono::steady_clock::time_point;

struct BatchAnswer {
  Answer answer;
  SteadyTime submitted;
  std::vector<SteadyTime> token_times;  // when the engine delivered each token
};

struct BatchRun {
  SteadyTime begin, end;
  std::vector<BatchAnswer> answers;  // in the order of the requests
  int64_t peak_concurrency = 0;      // maximum of requests submitted and not ended

  double seconds() const { return std::chrono::duration<double>(end - begin).count(); }
};

// Runs requests, each with n = 1. At most max_concurrency are submitted at a time (0: no limit).
// on_finished(index) is called on the engine's thread when a request ends. The first request that
// is refused or fails ends the run with its error, prefixed by "request INDEX".
Result<BatchRun> run_batch(Engine& engine, const std::vector<Request>& requests,
                           int64_t max_concurrency,
                           const std::function<void(size_t index)>& on_finished);

}  // namespace fathom
