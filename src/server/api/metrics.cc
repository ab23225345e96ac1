#include "server/api/metrics.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "cache/latent_layout.h"

namespace fathom {
namespace {

// vLLM's bucket bounds in seconds; its dashboards expect them.
constexpr double kTtftBounds[] = {.001, .005, .01, .02, .04, .06, .08, .1, .25, .5,  .75,
                                  1.0,  2.5,  5.0, 7.5, 10,  20,  40,  80, 160, 640, 2560};
constexpr double kGapBounds[] = {.01, .025, .05, .075, .1,  .15, .2,  .3, .4, .5,
                                 .75, 1.0,  2.5, 5.,   7.5, 10,  20., 40, 80};
constexpr double kSecondsBounds[] = {.3, .5, .8, 1., 1.5, 2.,  2.5, 5.,  10,   15,  20,
                                     30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680};
constexpr double kTokenBounds[] = {1,   2,    5,    10,   20,    50,    100,   200,
                                   500, 1000, 2000, 5000, 10000, 20000, 50000, 100000};
constexpr double kChoiceBounds[] = {1, 2, 5, 10, 20};

// Returns every vLLM family again, with `prefix` instead of "vllm:".
std::string renamed(std::string_view page, std::string_view prefix) {
  constexpr std::string_view kTheirs = "vllm:";
  std::string out;
  for (size_t begin = 0; begin < page.size();) {
    const size_t end = page.find('\n', begin) + 1;
    const std::string_view line = page.substr(begin, end - begin);
    begin = end;
    const size_t name = line.starts_with("# ") ? std::string_view("# HELP ").size() : 0;
    if (!line.substr(name).starts_with(kTheirs)) continue;
    out.append(line.substr(0, name)).append(prefix).append(line.substr(name + kTheirs.size()));
  }
  return out;
}

}  // namespace

std::string engine_labels(std::string_view model_name) {
  return fmt::format("engine=\"0\",model_name=\"{}\"", escaped_label(model_name));
}

Metrics::Metrics(std::string prefix)
    : prefix_(std::move(prefix)),
      ttft_(kTtftBounds),
      token_gap_(kGapBounds),
      e2e_(kSecondsBounds),
      queue_(kSecondsBounds),
      prefill_(kSecondsBounds),
      decode_(kSecondsBounds),
      inference_(kSecondsBounds),
      prompt_tokens_(kTokenBounds),
      generation_tokens_(kTokenBounds),
      params_n_(kChoiceBounds),
      params_max_tokens_(kTokenBounds) {}

void Metrics::count_rejection(const ApiError& error) {
  auto& counter = error.status == 429  ? rejected_queue_full_
                  : error.status < 500 ? rejected_invalid_
                                       : rejected_other_;
  counter.fetch_add(1, std::memory_order_relaxed);
}

void Metrics::count_disconnect() { disconnects_.fetch_add(1, std::memory_order_relaxed); }

void Metrics::observe_token_gap(double seconds) { token_gap_.observe(seconds); }

void Metrics::observe_request(const SamplingParams& params) {
  params_n_.observe(params.n);
  if (params.max_tokens) params_max_tokens_.observe(static_cast<double>(*params.max_tokens));
}

void Metrics::observe_finish(const Event& event) {
  finished_[static_cast<size_t>(*event.finish)].fetch_add(1, std::memory_order_relaxed);
  const RequestTimings& times = event.timings;
  ttft_.observe(times.ttft_seconds());
  e2e_.observe(times.total_seconds());
  queue_.observe(times.queue_seconds());
  prefill_.observe(times.ttft_seconds() - times.queue_seconds());
  decode_.observe(times.decode_seconds());
  inference_.observe(times.total_seconds() - times.queue_seconds());
  prompt_tokens_.observe(static_cast<double>(event.usage.prompt_tokens));
  generation_tokens_.observe(static_cast<double>(event.usage.completion_tokens));
}

namespace {

// Loads of experts on expert-parallel ranks.
void write_experts(std::string_view labels, const ExpertStats& experts, std::string& out) {
  append_metric(out, "fathom_expert_parallel_balance", "gauge",
                "Mean over maximum of the ranks' routed tokens, all layers, of the last steps.",
                labels, experts.window.balance);
  append_family(
      out, "fathom_expert_layer_balance", "gauge",
      "Mean over maximum of the ranks' routed tokens in a layer with experts, of the last steps.");
  for (size_t layer = 0; layer < experts.layer_balance.size(); ++layer) {
    out += fmt::format("fathom_expert_layer_balance{{{},layer=\"{}\"}} {}\n", labels, layer,
                       experts.layer_balance[layer]);
  }
  append_family(out, "fathom_expert_tokens_total", "counter",
                "Tokens routed to an expert of a layer with experts.");
  const auto per_layer = static_cast<size_t>(experts.experts);
  for (size_t i = 0; i < experts.tokens.size(); ++i) {
    out += fmt::format("fathom_expert_tokens_total{{{},layer=\"{}\",expert=\"{}\"}} {}\n", labels,
                       i / per_layer, i % per_layer, experts.tokens[i]);
  }
  append_metric(out, "fathom_expert_moves_total", "counter",
                "Times that experts moved to balance ranks.", labels, experts.moves);
}

}  // namespace

// What each data-parallel rank has of its own; a single one has no label of its number.
void Metrics::write_lanes(std::string_view labels, const EngineStats& engine, std::string& out) {
  const auto family = [&](std::string_view name, std::string_view type, std::string_view help,
                          const auto& figure) {
    append_family(out, name, type, help);
    for (size_t lane = 0; lane < engine.lanes.size(); ++lane) {
      out += fmt::format("{}{{{}{}}} {}\n", name, labels,
                         engine.lanes.size() == 1 ? "" : fmt::format(",dp_rank=\"{}\"", lane),
                         figure(engine.lanes[lane]));
    }
  };
  family("vllm:num_requests_running", "gauge", "Sequences in the batch.",
         [](const LaneStats& lane) { return lane.running; });
  // The waiting sequences include queued requests once the engine's thread has seen them; those
  // that it has not seen count as the first rank's.
  int64_t unseen = std::max<int64_t>(0, engine.queued_requests - engine.waiting);
  family("vllm:num_requests_waiting", "gauge",
         "Sequences that wait for their first step, or for recomputation after preemption.",
         [&](const LaneStats& lane) { return lane.waiting + std::exchange(unseen, 0); });
  family("vllm:kv_cache_usage_perc", "gauge",
         "Share of the KV cache's pages held by sequences, 0 to 1.", [](const LaneStats& lane) {
           return static_cast<double>(lane.pages_used) /
                  static_cast<double>(std::max<int64_t>(lane.pages_total, 1));
         });
  family("vllm:num_preemptions_total", "counter", "Preempted sequences.",
         [](const LaneStats& lane) { return lane.preemptions; });
  append_family(out, "fathom_kv_pages", "gauge", "Pages of the KV cache by state.");
  for (size_t number = 0; number < engine.lanes.size(); ++number) {
    const LaneStats& lane = engine.lanes[number];
    const std::string rank = engine.lanes.size() == 1 ? "" : fmt::format(",dp_rank=\"{}\"", number);
    const auto pages = [&](std::string_view state, int64_t count) {
      out += fmt::format("fathom_kv_pages{{{}{},state=\"{}\"}} {}\n", labels, rank, state, count);
    };
    pages("free", lane.pages_total - lane.pages_used - lane.pages_cached - lane.pages_in_transfer -
                      lane.pages_quarantined);
    pages("cached", lane.pages_cached);
    pages("used", lane.pages_used);
    pages("in_transfer", lane.pages_in_transfer);
    pages("quarantined", lane.pages_quarantined);
  }
}

// By vLLM's names.
void write_speculation(std::string_view labels, const SpeculationStats& stats, std::string& out) {
  const auto counter = [&](std::string_view name, int64_t number, std::string_view help) {
    append_metric(out, name, "counter", help, labels, number);
  };
  counter("vllm:spec_decode_num_drafts_total", stats.drafts,
          "Windows of drafts: a sequence's in one step.");
  counter("vllm:spec_decode_num_draft_tokens_total", stats.draft_tokens, "Drafts in them.");
  counter("vllm:spec_decode_num_accepted_tokens_total", stats.accepted_tokens,
          "Drafts that became tokens.");
  constexpr std::string_view kByPosition = "vllm:spec_decode_num_accepted_tokens_per_pos_total";
  append_family(out, kByPosition, "counter",
                "Drafts that became tokens, by position in their window.");
  for (size_t i = 0; i < stats.accepted_per_pos.size(); ++i) {
    out += fmt::format("{}{{{},position=\"{}\"}} {}\n", kByPosition, labels, i,
                       stats.accepted_per_pos[i]);
  }
}

void Metrics::write_engine(std::string_view labels, const EngineStats& engine,
                           const CacheConfig& cache, std::string& out) const {
  const auto gauge = [&](std::string_view name, auto number, std::string_view help) {
    append_metric(out, name, "gauge", help, labels, number);
  };
  const auto counter = [&](std::string_view name, auto number, std::string_view help) {
    append_metric(out, name, "counter", help, labels, number);
  };
  write_lanes(labels, engine, out);
  counter("vllm:prompt_tokens_total", engine.prompt_tokens, "Prompt tokens computed.");
  counter("vllm:generation_tokens_total", engine.generated_tokens, "Tokens generated.");
  counter("vllm:prefix_cache_queries_total", engine.prefix_queries,
          "Prompt tokens looked up in the prefix cache.");
  counter("vllm:prefix_cache_hits_total", engine.prefix_hits,
          "Prompt tokens found in the prefix cache.");
  gauge("fathom_last_step_age_seconds", engine.last_step_age_seconds,
        "Seconds since the engine's last step ended.");
  counter("fathom_steps_total", engine.steps, "Steps of the engine.");
  counter("fathom_step_seconds_total", engine.step_seconds, "Seconds spent in steps.");
  counter("fathom_moved_sequences_total", engine.sequences_moved,
          "Waiting or preempted sequences that went to another data-parallel rank.");
  counter("fathom_copied_pages_total", engine.pages_copied,
          "Pages of cached prefixes copied from another data-parallel rank.");
  counter("fathom_expired_requests_total", engine.expired, "Requests ended by a deadline.");
  append_metric(out, "vllm:cache_config_info", "gauge", "KV cache settings; always 1.",
                fmt::format("{},block_size=\"{}\",cache_dtype=\"{}\",enable_prefix_caching=\"{}\","
                            "num_gpu_blocks=\"{}\"",
                            labels, kPageSize, escaped_label(cache.dtype),
                            cache.prefix_caching ? "True" : "False", engine.pages_total),
                1);
  append_family(out, "vllm:iteration_tokens_total", "histogram",
                "Tokens of a step, prefill and decode.");
  append_histogram("vllm:iteration_tokens_total", labels, std::span<const int64_t>(kStepRowBounds),
                   engine.steps_by_rows, engine.rows, out);
  write_speculation(labels, engine.speculation, out);
  if (engine.experts) write_experts(labels, *engine.experts, out);
}

std::string Metrics::text(std::string_view model_name, const EngineStats* engine,
                          const CacheConfig& cache, const http::ServerStats& http) const {
  std::string out;
  const std::string labels = engine_labels(model_name);
  const auto counter = [&](std::string_view name, auto number, std::string_view help) {
    append_metric(out, name, "counter", help, labels, number);
  };
  if (engine != nullptr) write_engine(labels, *engine, cache, out);

  append_family(out, "vllm:request_success_total", "counter", "Finished choices by reason.");
  for (const FinishReason reason :
       {FinishReason::kStop, FinishReason::kLength, FinishReason::kAbort, FinishReason::kError}) {
    out += fmt::format("vllm:request_success_total{{{},finished_reason=\"{}\"}} {}\n", labels,
                       name_of(reason), finished_[static_cast<size_t>(reason)].load());
  }
  append_family(out, "fathom_requests_rejected_total", "counter",
                "Requests that got an error instead of a completion, by reason.");
  const auto rejected = [&](std::string_view reason, int64_t count) {
    out += fmt::format("fathom_requests_rejected_total{{{},reason=\"{}\"}} {}\n", labels, reason,
                       count);
  };
  rejected("queue_full", rejected_queue_full_);
  rejected("invalid", rejected_invalid_);
  rejected("other", rejected_other_);
  counter("fathom_client_disconnects_total", disconnects_.load(),
          "Clients that disconnected before the end of their response.");

  const auto histogram = [&](std::string_view name, const Histogram& values,
                             std::string_view help) {
    append_family(out, name, "histogram", help);
    values.write(name, labels, out);
  };
  histogram("vllm:time_to_first_token_seconds", ttft_,
            "Seconds from submission to the first token.");
  histogram("vllm:inter_token_latency_seconds", token_gap_,
            "Seconds between two tokens of a choice.");
  histogram("vllm:e2e_request_latency_seconds", e2e_, "Seconds from submission to the last token.");
  histogram("vllm:request_queue_time_seconds", queue_,
            "Seconds from submission to the first step.");
  histogram("vllm:request_prefill_time_seconds", prefill_,
            "Seconds from the first step to the first token.");
  histogram("vllm:request_decode_time_seconds", decode_,
            "Seconds from the first token to the last.");
  histogram("vllm:request_inference_time_seconds", inference_,
            "Seconds from the first step to the end.");
  histogram("vllm:request_prompt_tokens", prompt_tokens_, "Tokens of a prompt.");
  histogram("vllm:request_generation_tokens", generation_tokens_, "Tokens of a choice.");
  histogram("vllm:request_params_n", params_n_, "Choices asked for.");
  histogram("vllm:request_params_max_tokens", params_max_tokens_, "Limits asked for.");

  append_metric(out, "fathom_http_connections", "gauge", "Open connections.", "", http.connections);
  append_metric(out, "fathom_http_requests_in_flight", "gauge",
                "Requests whose response is not complete.", "", http.requests_in_flight);
  append_metric(out, "fathom_http_connections_refused_total", "counter",
                "Connections refused above --max-connections.", "", http.connections_refused);
  append_family(out, "fathom_http_responses_total", "counter", "Responses by class of status.");
  for (int status = 1; status <= 5; ++status) {
    out += fmt::format("fathom_http_responses_total{{class=\"{}xx\"}} {}\n", status,
                       http.responses[status]);
  }
  append_build_metrics(out);
  append_process_metrics(out);
  if (!prefix_.empty()) out += renamed(out, prefix_);
  return out;
}

}  // namespace fathom
