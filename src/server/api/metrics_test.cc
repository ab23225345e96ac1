#include "server/api/metrics.h"

#include <gtest/gtest.h>

#include <map>
#include <sstream>

namespace fathom {
namespace {

// Every sample of a page by its name and labels; fails on a line that is neither sample nor
// comment, and on a sample without the HELP and TYPE of its family.
std::map<std::string, double> samples(const std::string& page) {
  std::map<std::string, double> found;
  std::map<std::string, int> described;
  std::istringstream lines(page);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("# HELP ") || line.starts_with("# TYPE ")) {
      ++described[line.substr(7, line.find(' ', 7) - 7)];
      continue;
    }
    const size_t space = line.rfind(' ');
    EXPECT_NE(space, std::string::npos) << line;
    std::string family = line.substr(0, line.find('{'));
    for (const char* suffix : {"_bucket", "_sum", "_count"}) {
      const std::string base = family.substr(0, family.rfind(suffix));
      if (family.ends_with(suffix) && described.contains(base)) family = base;
    }
    EXPECT_EQ(described[family], 2) << line;
    EXPECT_TRUE(found.emplace(line.substr(0, space), std::stod(line.substr(space + 1))).second)
        << line;
  }
  return found;
}

TEST(Histogram, CountsUpToEachBound) {
  static constexpr double kBounds[] = {1, 2.5};
  Histogram histogram(kBounds);
  for (const double value : {0.5, 1.0, 2.0, 7.0}) histogram.observe(value);
  std::string out;
  histogram.write("h", "a=\"b\"", out);
  EXPECT_EQ(out,
            "h_bucket{a=\"b\",le=\"1\"} 2\nh_bucket{a=\"b\",le=\"2.5\"} 3\n"
            "h_bucket{a=\"b\",le=\"+Inf\"} 4\nh_sum{a=\"b\"} 10.5\nh_count{a=\"b\"} 4\n");
}

TEST(Metrics, ThePageIsWellFormedAndCounts) {
  Metrics metrics;
  Event event;
  event.finish = FinishReason::kLength;
  event.usage = {.prompt_tokens = 30, .completion_tokens = 4};
  const RequestTimings::Time start{};
  event.timings = {start, start + std::chrono::milliseconds(10),
                   start + std::chrono::milliseconds(60), start + std::chrono::milliseconds(700)};
  metrics.observe_finish(event);
  metrics.observe_token_gap(0.02);
  metrics.count_rejection(ApiError(429, "full"));
  metrics.count_rejection(ApiError(400, "bad"));
  metrics.count_disconnect();
  EngineStats stats;
  stats.waiting = stats.queued_requests = 3;  // the same three
  stats.pages_total = 100;
  stats.pages_used = 25;
  stats.pages_cached = 5;
  http::ServerStats http;
  http.responses[4] = 2;

  const auto page = samples(metrics.text("a \"b\"\\c", &stats, http));
  const std::string labels = R"({engine="0",model_name="a \"b\"\\c")";
  EXPECT_EQ(page.at("vllm:num_requests_waiting" + labels + "}"), 3);
  EXPECT_EQ(page.at("vllm:kv_cache_usage_perc" + labels + "}"), 0.25);
  EXPECT_EQ(page.at("fathom_kv_pages" + labels + ",state=\"free\"}"), 70);
  EXPECT_EQ(page.at("vllm:request_success_total" + labels + ",finished_reason=\"length\"}"), 1);
  EXPECT_EQ(page.at("vllm:request_success_total" + labels + ",finished_reason=\"stop\"}"), 0);
  EXPECT_EQ(page.at("vllm:time_to_first_token_seconds_bucket" + labels + ",le=\"0.04\"}"), 0);
  EXPECT_EQ(page.at("vllm:time_to_first_token_seconds_bucket" + labels + ",le=\"0.06\"}"), 1);
  EXPECT_NEAR(page.at("vllm:request_decode_time_seconds_sum" + labels + "}"), 0.64, 1e-9);
  EXPECT_EQ(page.at("fathom_requests_rejected_total" + labels + ",reason=\"queue_full\"}"), 1);
  EXPECT_EQ(page.at("fathom_requests_rejected_total" + labels + ",reason=\"invalid\"}"), 1);
  EXPECT_EQ(page.at("fathom_http_responses_total{class=\"4xx\"}"), 2);
  EXPECT_GT(page.at("process_resident_memory_bytes{}"), 0);
}

TEST(Metrics, WithoutAnEngineThePageHasWhatIsKnown) {
  const auto page = samples(Metrics().text("", nullptr, {}));
  EXPECT_FALSE(page.contains(R"(vllm:num_requests_running{engine="0",model_name=""})"));
  EXPECT_TRUE(page.contains("process_open_fds{}"));
}

}  // namespace
}  // namespace fathom
