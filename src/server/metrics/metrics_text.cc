#include "server/metrics/metrics_text.h"

#include <algorithm>

#include "base/version.h"
#include "server/metrics/process_figures.h"

namespace fathom {

void append_family(std::string& out, std::string_view name, std::string_view type,
                   std::string_view help) {
  out += fmt::format("# HELP {} {}\n# TYPE {} {}\n", name, help, name, type);
}

std::string escaped_label(std::string_view text) {
  std::string result;
  for (const char c : text) {
    if (c == '\\' || c == '"') result += '\\';
    result += c == '\n' ? ' ' : c;
  }
  return result;
}

void append_build_metrics(std::string& out) {
  append_metric(
      out, "fathom_build_info", "gauge", "Version, commit and CUDA version of the build; always 1.",
      fmt::format("version=\"{}\",commit=\"{}\",cuda=\"{}\"", escaped_label(program_version()),
                  escaped_label(program_commit()), escaped_label(program_cuda())),
      1);
}

void append_process_metrics(std::string& out) {
  const ProcessFigures figures = process_figures();
  append_metric(out, "process_resident_memory_bytes", "gauge", "Resident memory.", "",
                figures.resident_bytes);
  append_metric(out, "process_virtual_memory_bytes", "gauge", "Address space in use.", "",
                figures.virtual_bytes);
  append_metric(out, "process_open_fds", "gauge", "Open file descriptors.", "", figures.open_files);
  append_metric(out, "process_max_fds", "gauge", "Limit of open file descriptors.", "",
                figures.max_files);
  append_metric(out, "process_start_time_seconds", "gauge",
                "Start of the process, seconds since 1970.", "", figures.start_seconds);
  append_metric(out, "process_cpu_seconds_total", "counter", "CPU seconds of all threads.", "",
                figures.cpu_seconds);
}

void Histogram::observe(double value) {
  const auto bucket = std::lower_bound(bounds_.begin(), bounds_.end(), value) - bounds_.begin();
  counts_[static_cast<size_t>(bucket)].fetch_add(1, std::memory_order_relaxed);
  sum_.fetch_add(value, std::memory_order_relaxed);
}

void Histogram::write(std::string_view name, std::string_view labels, std::string& out) const {
  std::array<int64_t, kMaxBuckets> counts{};
  for (size_t i = 0; i <= bounds_.size(); ++i)
    counts[i] = counts_[i].load(std::memory_order_relaxed);
  append_histogram(name, labels, bounds_, std::span<const int64_t>(counts),
                   sum_.load(std::memory_order_relaxed), out);
}

}  // namespace fathom
