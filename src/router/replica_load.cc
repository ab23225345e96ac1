#include "router/replica_load.h"

#include <algorithm>
#include <charconv>
#include <cmath>

namespace fathom::router {
namespace {

struct Sample {
  std::string_view name;
  double value = 0;
};

// Parses "name{labels} value" or "name value"; a timestamp may follow.
std::optional<Sample> parse_sample(std::string_view line) {
  if (line.empty() || line.front() == '#') return std::nullopt;
  Sample sample{.name = line.substr(0, line.find_first_of("{ "))};
  size_t begin = sample.name.size();
  if (begin < line.size() && line[begin] == '{') {
    // Label values are quoted and may have any character; the labels end at the last bracket.
    begin = line.rfind('}');
    if (begin == std::string_view::npos) return std::nullopt;
    ++begin;
  }
  begin = line.find_first_not_of(' ', begin);
  if (begin == std::string_view::npos) return std::nullopt;
  const auto read = std::from_chars(line.data() + begin, line.data() + line.size(), sample.value);
  if (read.ec != std::errc() || !std::isfinite(sample.value)) return std::nullopt;
  return sample;
}

int64_t requests(double value) {
  constexpr double kMost = 1e9;  // more is nonsense, and sums must not overflow
  return static_cast<int64_t>(std::clamp(value, 0.0, kMost));
}

}  // namespace

std::optional<ReplicaLoad> parse_load(std::string_view page) {
  ReplicaLoad load;
  bool found = false;
  while (!page.empty()) {
    const size_t end = std::min(page.find('\n'), page.size());
    const auto sample = parse_sample(page.substr(0, end));
    page.remove_prefix(std::min(end + 1, page.size()));
    if (!sample) continue;
    const std::string_view name = sample->name;
    if (name == "vllm:num_requests_running" || name == "sglang:num_running_reqs") {
      load.running += requests(sample->value);
      found = true;
    } else if (name == "vllm:num_requests_waiting" || name == "sglang:num_queue_reqs") {
      load.waiting += requests(sample->value);
      found = true;
    } else if (name == "vllm:kv_cache_usage_perc" || name == "vllm:gpu_cache_usage_perc" ||
               name == "sglang:token_usage") {
      load.cache_use = std::max(load.cache_use, std::clamp(sample->value, 0.0, 1.0));
    }
  }
  if (!found) return std::nullopt;
  return load;
}

}  // namespace fathom::router
