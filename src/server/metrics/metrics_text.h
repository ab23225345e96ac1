// Metrics in the Prometheus text format: families, histograms, and those of the process itself.
#pragma once

#include <fmt/format.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace fathom {

// Appends HELP and TYPE of a family; its samples follow.
void append_family(std::string& out, std::string_view name, std::string_view type,
                   std::string_view help);

// Appends a family of one sample. `labels` has the form a="1",b="2" and may be empty.
template <typename T>
void append_metric(std::string& out, std::string_view name, std::string_view type,
                   std::string_view help, std::string_view labels, T number) {
  append_family(out, name, type, help);
  out += fmt::format("{}{{{}}} {}\n", name, labels, number);
}

// Escapes a label's value.
std::string escaped_label(std::string_view text);

// Appends the samples name_bucket{labels,le="…"}, name_sum and name_count. counts[i] counts values
// at most bounds[i] and above bounds[i - 1]; counts[bounds.size()] counts larger ones.
template <typename Bound, typename Sum>
void append_histogram(std::string_view name, std::string_view labels, std::span<const Bound> bounds,
                      std::span<const int64_t> counts, Sum sum, std::string& out) {
  int64_t below = 0;
  const std::string_view comma = labels.empty() ? "" : ",";
  for (size_t i = 0; i < bounds.size(); ++i) {
    below += counts[i];
    out += fmt::format("{}_bucket{{{}{}le=\"{}\"}} {}\n", name, labels, comma, bounds[i], below);
  }
  below += counts[bounds.size()];
  out += fmt::format("{}_bucket{{{}{}le=\"+Inf\"}} {}\n", name, labels, comma, below);
  out += fmt::format("{}_sum{{{}}} {}\n", name, labels, sum);
  out += fmt::format("{}_count{{{}}} {}\n", name, labels, below);
}

// Histogram with fixed upper bounds. Any thread may call.
class Histogram {
 public:
  static constexpr size_t kMaxBuckets = 24;

  // `bounds` is ascending, has at most kMaxBuckets - 1 entries and outlives the histogram.
  explicit Histogram(std::span<const double> bounds) : bounds_(bounds) {}

  void observe(double value);
  // Appends the samples, without HELP and TYPE.
  void write(std::string_view name, std::string_view labels, std::string& out) const;

 private:
  const std::span<const double> bounds_;
  std::array<std::atomic<int64_t>, kMaxBuckets> counts_{};
  std::atomic<double> sum_{0};
};

// Appends the families about this process and its build.
void append_build_metrics(std::string& out);
void append_process_metrics(std::string& out);

}  // namespace fathom
