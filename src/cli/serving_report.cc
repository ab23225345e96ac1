#include "cli/serving_report.h"

#include <algorithm>
#include <string_view>

#include "cli/bench.h"

namespace fathom {
namespace {

using Time = std::chrono::steady_clock::time_point;

struct Metric {
  const char *key, *name, *title;
  std::vector<double> ServingFigures::*values;
};

constexpr Metric kMetrics[] = {
    {"ttft", "TTFT", "Time to First Token", &ServingFigures::ttft},
    {"tpot", "TPOT", "Time per Output Token (excl. 1st token)", &ServingFigures::tpot},
    {"itl", "ITL", "Inter-token Latency", &ServingFigures::itl},
    {"e2el", "E2EL", "End-to-end Latency", &ServingFigures::e2el},
};

double milliseconds(Time from, Time to) {
  return std::chrono::duration<double, std::milli>(to - from).count();
}

bool within(double value, std::optional<double> limit) { return !limit || value <= *limit; }

template <typename T>
void line(std::string_view label, T value) {
  if constexpr (std::is_floating_point_v<T>) {
    fmt::print("{:<40} {:<10.2f}\n", label, value);
  } else {
    fmt::print("{:<40} {:<10}\n", label, value);
  }
}

bool wanted(const Metric& metric, const ServingReportOptions& options) {
  return std::find(options.metrics.begin(), options.metrics.end(), metric.key) !=
         options.metrics.end();
}

void print_delays(const Metric& metric, const std::vector<double>& values,
                  const std::vector<double>& percentiles) {
  fmt::print("{:-^50}\n", metric.title);
  const bool none = values.empty();
  line(fmt::format("Mean {} (ms):", metric.name), none ? 0.0 : mean(values));
  line(fmt::format("Median {} (ms):", metric.name), none ? 0.0 : percentile(values, 50));
  for (const double percent : percentiles) {
    line(fmt::format("P{} {} (ms):", percent, metric.name),
         none ? 0.0 : percentile(values, percent));
  }
}

}  // namespace

ServingFigures measure_serving(const std::vector<ServedRequest>& requests, Time begin,
                               double seconds, const ServiceGoals& goals) {
  ServingFigures figures;
  figures.seconds = seconds;
  int64_t good = 0;
  std::vector<double> per_second(static_cast<size_t>(seconds) + 1);
  for (const ServedRequest& request : requests) {
    ++figures.completed;
    figures.input_tokens += request.input_tokens;
    figures.output_tokens += request.output_tokens;
    figures.cached_tokens += request.cached_tokens;
    figures.accepted_tokens += request.accepted_tokens;
    const auto& times = request.token_times;
    if (times.empty()) continue;
    const double ttft = milliseconds(request.submitted, times.front());
    const double e2el = milliseconds(request.submitted, times.back());
    const double tpot = request.output_tokens > 1
                            ? (e2el - ttft) / static_cast<double>(request.output_tokens - 1)
                            : 0;
    figures.ttft.push_back(ttft);
    figures.e2el.push_back(e2el);
    if (request.output_tokens > 1) figures.tpot.push_back(tpot);
    for (size_t i = 1; i < times.size(); ++i) {
      figures.itl.push_back(milliseconds(times[i - 1], times[i]));
    }
    good += within(ttft, goals.ttft) && within(tpot, goals.tpot) && within(e2el, goals.e2el);
    // A piece may contain several tokens.
    const double share =
        static_cast<double>(request.output_tokens) / static_cast<double>(times.size());
    for (const Time time : times) {
      const auto second = static_cast<size_t>(milliseconds(begin, time) / 1e3);
      per_second[std::min(second, per_second.size() - 1)] += share;
    }
  }
  // A run shorter than a second has no full second; its mean is used.
  figures.peak_output_rate = std::max(*std::max_element(per_second.begin(), per_second.end()),
                                      figures.per_second(figures.output_tokens));
  if (goals.any()) figures.good = good;
  return figures;
}

void print_serving_report(const ServingFigures& figures, const ServingReportOptions& options) {
  fmt::print("{:=^50}\n", " Serving Benchmark Result ");
  line("Successful requests:", figures.completed);
  line("Failed requests:", figures.failed);
  if (figures.cancelled > 0) line("Cancelled requests:", figures.cancelled);
  if (options.max_concurrency > 0) line("Maximum request concurrency:", options.max_concurrency);
  line("Request rate configured (RPS):", options.request_rate);
  line("Benchmark duration (s):", figures.seconds);
  line("Total input tokens:", figures.input_tokens);
  if (figures.cached_tokens > 0) line("Cached input tokens:", figures.cached_tokens);
  line("Total generated tokens:", figures.output_tokens);
  if (figures.accepted_tokens > 0) line("Accepted draft tokens:", figures.accepted_tokens);
  line("Request throughput (req/s):", figures.per_second(figures.completed));
  if (figures.good) line("Request goodput (req/s):", figures.per_second(*figures.good));
  line("Output token throughput (tok/s):", figures.per_second(figures.output_tokens));
  line("Peak output token throughput (tok/s):", figures.peak_output_rate);
  line("Peak concurrent requests:", static_cast<double>(figures.peak_concurrency));
  line("Total token throughput (tok/s):",
       figures.per_second(figures.input_tokens + figures.output_tokens));
  for (const Metric& metric : kMetrics) {
    if (wanted(metric, options)) print_delays(metric, figures.*metric.values, options.percentiles);
  }
  fmt::print("{:=^50}\n", "");
}

void add_serving_figures(const ServingFigures& figures, const ServingReportOptions& options,
                         json::object& object) {
  object["duration"] = figures.seconds;
  object["completed"] = figures.completed;
  object["failed"] = figures.failed;
  object["total_input_tokens"] = figures.input_tokens;
  object["total_output_tokens"] = figures.output_tokens;
  object["request_throughput"] = figures.per_second(figures.completed);
  if (figures.good) object["request_goodput"] = figures.per_second(*figures.good);
  object["output_throughput"] = figures.per_second(figures.output_tokens);
  object["max_output_tokens_per_s"] = figures.peak_output_rate;
  object["max_concurrent_requests"] = figures.peak_concurrency;
  object["total_token_throughput"] =
      figures.per_second(figures.input_tokens + figures.output_tokens);
  for (const Metric& metric : kMetrics) {
    const std::vector<double>& values = figures.*metric.values;
    if (values.empty() || !wanted(metric, options)) continue;
    object[fmt::format("mean_{}_ms", metric.key)] = mean(values);
    object[fmt::format("median_{}_ms", metric.key)] = percentile(values, 50);
    for (const double percent : options.percentiles) {
      object[fmt::format("p{}_{}_ms", percent, metric.key)] = percentile(values, percent);
    }
  }
}

}  // namespace fathom
