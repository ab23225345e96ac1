// The /metrics page in the Prometheus text format. Names are vLLM's, so that its dashboards and
// autoscalers work; metrics that vLLM does not have begin with "fathom_".
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>

#include "engine/engine.h"
#include "server/http/server.h"
#include "server/metrics/metrics_text.h"
#include "server/openai/api_error.h"

namespace fathom {

// Cache settings as vLLM reports them; the number of pages comes from the engine.
struct CacheConfig {
  std::string dtype;  // "bf16", "fp8"
  bool prefix_caching = false;
};

// The labels of metrics of a model's engine.
std::string engine_labels(std::string_view model_name);

// Counters and histograms of the server. Any thread may call.
class Metrics {
 public:
  // `prefix`: vLLM's metrics are exported again with "vllm:" replaced by it; empty: not.
  explicit Metrics(std::string prefix = {});

  void count_rejection(const ApiError& error);  // a request without completion
  void count_disconnect();                      // a client that disconnected before the end
  void observe_token_gap(double seconds);
  // `event` ends one choice and carries its usage and timings.
  void observe_finish(const Event& event);
  void observe_request(const SamplingParams& params);

  // Returns the page. `engine` is null while the model loads; its metrics are then missing.
  std::string text(std::string_view model_name, const EngineStats* engine, const CacheConfig& cache,
                   const http::ServerStats& http) const;

 private:
  static void write_lanes(std::string_view labels, const EngineStats& engine, std::string& out);
  void write_engine(std::string_view labels, const EngineStats& engine, const CacheConfig& cache,
                    std::string& out) const;

  const std::string prefix_;
  std::array<std::atomic<int64_t>, 4> finished_{};  // index: FinishReason
  std::atomic<int64_t> rejected_queue_full_{0}, rejected_invalid_{0}, rejected_other_{0};
  std::atomic<int64_t> disconnects_{0};
  Histogram ttft_, token_gap_, e2e_, queue_, prefill_, decode_, inference_;
  Histogram prompt_tokens_, generation_tokens_, params_n_, params_max_tokens_;
};

}  // namespace fathom
