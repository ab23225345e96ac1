// What /metrics says, in Prometheus' text form and with vLLM's names, so that its dashboards and
// autoscalers work; what vLLM has no name for begins with "fathom_".
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "engine/engine.h"
#include "server/http/server.h"
#include "server/openai/api_error.h"

namespace fathom {

// Counts observations by upper bounds. Any thread.
class Histogram {
 public:
  static constexpr size_t kMaxBuckets = 24;

  // `bounds` ascends, at most kMaxBuckets - 1 of them, and outlives the histogram.
  explicit Histogram(std::span<const double> bounds) : bounds_(bounds) {}

  void observe(double value);
  // Its lines, without HELP and TYPE: name_bucket{labels,le="…"}, name_sum, name_count.
  void write(std::string_view name, std::string_view labels, std::string& out) const;

 private:
  const std::span<const double> bounds_;
  std::array<std::atomic<int64_t>, kMaxBuckets> counts_{};
  std::atomic<double> sum_{0};
};

// What vLLM tells of its cache; the number of pages is the engine's.
struct CacheConfig {
  std::string dtype;  // "bf16", "fp8"
  bool prefix_caching = false;
};

// Any thread.
class Metrics {
 public:
  // `prefix`: vLLM's metrics are there a second time with "vllm:" replaced by it; empty: not.
  explicit Metrics(std::string prefix = {});

  void count_rejection(const ApiError& error);  // a request that got no answer
  void count_disconnect();                      // a client that left before its answer's end
  void observe_token_gap(double seconds);
  void observe_finish(const Event& event);  // of one choice, with its usage and timings
  void observe_request(const SamplingParams& params);

  // The whole page. Without an engine, while the model loads, what is known without one.
  std::string text(std::string_view model_name, const EngineStats* engine, const CacheConfig& cache,
                   const http::ServerStats& http) const;

 private:
  void write_engine(std::string_view labels, const EngineStats& engine, const CacheConfig& cache,
                    std::string& out) const;

  const std::string prefix_;
  std::array<std::atomic<int64_t>, 4> finished_{};  // by FinishReason
  std::atomic<int64_t> rejected_queue_full_{0}, rejected_invalid_{0}, rejected_other_{0};
  std::atomic<int64_t> disconnects_{0};
  Histogram ttft_, token_gap_, e2e_, queue_, prefill_, decode_, inference_;
  Histogram prompt_tokens_, generation_tokens_, params_n_, params_max_tokens_;
};

}  // namespace fathom
