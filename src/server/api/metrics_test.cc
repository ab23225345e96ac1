#include "server/api/metrics.h"

#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <sstream>

#include "base/version.h"
#include "server/metrics/process_figures.h"

namespace fathom {
namespace {

// Returns every sample by name and labels. Fails on a line that is neither sample nor comment, and
// on a sample without HELP and TYPE of its family.
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
  stats.waiting = stats.queued_requests = 3;  // the same three requests
  stats.pages_total = 100;
  stats.lanes = {{.waiting = 3,
                  .pages_total = 100,
                  .pages_used = 25,
                  .pages_cached = 5,
                  .pages_in_transfer = 2}};
  stats.steps_by_rows = {2, 0, 3};  // three steps of 9 to 16 rows
  stats.steps_by_rows.back() = 1;
  stats.rows = 20'036;
  stats.experts = {.ranks = 2,
                   .experts = 3,
                   .window = {.balance = 0.75},
                   .layer_balance = {0.5, 1},
                   .tokens = {5, 0, 1, 2, 2, 2},
                   .moves = 4,
                   .table = nullptr};
  http::ServerStats http;
  http.responses[4] = 2;

  const auto page =
      samples(metrics.text("a \"b\"\\c", &stats, {.dtype = "bf16", .prefix_caching = true}, http));
  const std::string labels = R"({engine="0",model_name="a \"b\"\\c")";
  EXPECT_EQ(page.at("vllm:num_requests_waiting" + labels + "}"), 3);
  EXPECT_EQ(page.at("vllm:kv_cache_usage_perc" + labels + "}"), 0.25);
  EXPECT_EQ(page.at("fathom_expert_parallel_balance" + labels + "}"), 0.75);
  EXPECT_EQ(page.at("fathom_expert_layer_balance" + labels + ",layer=\"0\"}"), 0.5);
  EXPECT_EQ(page.at("fathom_expert_tokens_total" + labels + ",layer=\"0\",expert=\"2\"}"), 1);
  EXPECT_EQ(page.at("fathom_expert_tokens_total" + labels + ",layer=\"1\",expert=\"0\"}"), 2);
  EXPECT_EQ(page.at("fathom_expert_moves_total" + labels + "}"), 4);
  EXPECT_EQ(page.at("fathom_kv_pages" + labels + ",state=\"free\"}"), 68);
  EXPECT_EQ(page.at("fathom_kv_pages" + labels + ",state=\"in_transfer\"}"), 2);
  EXPECT_EQ(page.at("vllm:request_success_total" + labels + ",finished_reason=\"length\"}"), 1);
  EXPECT_EQ(page.at("vllm:request_success_total" + labels + ",finished_reason=\"stop\"}"), 0);
  EXPECT_EQ(page.at("vllm:time_to_first_token_seconds_bucket" + labels + ",le=\"0.04\"}"), 0);
  EXPECT_EQ(page.at("vllm:time_to_first_token_seconds_bucket" + labels + ",le=\"0.06\"}"), 1);
  for (const auto& [name, seconds] : {std::pair("request_queue_time", 0.01),
                                      {"time_to_first_token", 0.06},
                                      {"request_prefill_time", 0.05},
                                      {"request_decode_time", 0.64},
                                      {"request_inference_time", 0.69},
                                      {"e2e_request_latency", 0.7},
                                      {"inter_token_latency", 0.02}}) {
    EXPECT_NEAR(page.at(fmt::format("vllm:{}_seconds_sum{}}}", name, labels)), seconds, 1e-9)
        << name;
    EXPECT_EQ(page.at(fmt::format("vllm:{}_seconds_count{}}}", name, labels)), 1) << name;
  }
  EXPECT_EQ(page.at("vllm:request_prompt_tokens_sum" + labels + "}"), 30);
  EXPECT_EQ(page.at("vllm:request_generation_tokens_sum" + labels + "}"), 4);
  EXPECT_EQ(page.at("fathom_requests_rejected_total" + labels + ",reason=\"queue_full\"}"), 1);
  EXPECT_EQ(page.at("fathom_requests_rejected_total" + labels + ",reason=\"invalid\"}"), 1);
  EXPECT_EQ(page.at("fathom_http_responses_total{class=\"4xx\"}"), 2);
  const auto steps = [&](const char* bound) {
    return page.at("vllm:iteration_tokens_total_bucket" + labels + ",le=\"" + bound + "\"}");
  };
  EXPECT_EQ(steps("1"), 2);
  EXPECT_EQ(steps("8"), 2);
  EXPECT_EQ(steps("16"), 5);
  EXPECT_EQ(steps("16384"), 5);
  EXPECT_EQ(steps("+Inf"), 6);
  EXPECT_EQ(page.at("vllm:iteration_tokens_total_sum" + labels + "}"), 20'036);
  EXPECT_EQ(page.at("vllm:cache_config_info" + labels +
                    ",block_size=\"64\",cache_dtype=\"bf16\",enable_prefix_caching=\"True\","
                    "num_gpu_blocks=\"100\"}"),
            1);
  EXPECT_GT(page.at("process_resident_memory_bytes{}"), 0);
}

TEST(Metrics, EachDataParallelRankHasItsOwnFigures) {
  EngineStats stats;
  stats.lanes = {{.running = 4, .waiting = 1, .pages_total = 10, .pages_used = 5},
                 {.running = 2, .pages_total = 10, .pages_cached = 3, .preemptions = 7}};
  stats.running = 6;
  stats.waiting = 1;
  stats.queued_requests = 3;
  stats.sequences_moved = 2;
  stats.pages_copied = 9;
  const auto page = samples(Metrics().text("m", &stats, {}, {}));
  const auto of = [&](const char* name, int rank, const char* more = "") {
    return page.at(
        fmt::format("{}{{engine=\"0\",model_name=\"m\",dp_rank=\"{}\"{}}}", name, rank, more));
  };
  EXPECT_EQ(of("vllm:num_requests_running", 0), 4);
  EXPECT_EQ(of("vllm:num_requests_running", 1), 2);
  EXPECT_EQ(of("vllm:num_requests_waiting", 0), 3) << "two that the engine has not seen";
  EXPECT_EQ(of("vllm:num_requests_waiting", 1), 0);
  EXPECT_EQ(of("vllm:kv_cache_usage_perc", 0), 0.5);
  EXPECT_EQ(of("vllm:num_preemptions_total", 1), 7);
  EXPECT_EQ(of("fathom_kv_pages", 1, ",state=\"free\""), 7);
  const std::string labels = R"({engine="0",model_name="m"})";
  EXPECT_EQ(page.at("fathom_moved_sequences_total" + labels), 2);
  EXPECT_EQ(page.at("fathom_copied_pages_total" + labels), 9);
  EXPECT_FALSE(page.contains("vllm:num_requests_running" + labels));
}

TEST(Metrics, WithoutAnEngineThePageHasWhatIsKnown) {
  const auto page = samples(Metrics().text("", nullptr, {}, {}));
  EXPECT_FALSE(page.contains(R"(vllm:num_requests_running{engine="0",model_name=""})"));
  EXPECT_TRUE(page.contains("process_open_fds{}"));
}

TEST(Metrics, OfTheProcessAreThoseOfThisOne) {
  const auto page = samples(Metrics().text("", nullptr, {}, {}));
  const double now =
      std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  // The process started less than a day ago. The kernel reports its start to 10 ms, the boot time
  // to a second.
  EXPECT_GT(page.at("process_start_time_seconds{}"), now - 86'400);
  EXPECT_LT(page.at("process_start_time_seconds{}"), now + 2);
  const double before = page.at("process_cpu_seconds_total{}");
  EXPECT_GT(before, 0);
  const auto used = [] { return process_figures().cpu_seconds; };
  while (used() < before + 0.01) {
  }
  EXPECT_GE(samples(Metrics().text("", nullptr, {}, {})).at("process_cpu_seconds_total{}"),
            before + 0.01);
  EXPECT_GT(page.at("process_virtual_memory_bytes{}"), page.at("process_resident_memory_bytes{}"));
  EXPECT_GE(page.at("process_max_fds{}"), page.at("process_open_fds{}"));
}

TEST(Metrics, SayWhatTheProgramIsBuiltOf) {
  EXPECT_NE(*program_version(), 0);
  const auto page = samples(Metrics().text("", nullptr, {}, {}));
  EXPECT_EQ(page.at(fmt::format("fathom_build_info{{version=\"{}\",commit=\"{}\",cuda=\"{}\"}}",
                                program_version(), program_commit(), program_cuda())),
            1);
}

// With a prefix every vLLM family is exported twice with equal values, and nothing else is.
TEST(Metrics, APrefixExportsThemASecondTime) {
  EngineStats stats;
  stats.pages_total = 100;
  const auto plain = samples(Metrics().text("m", &stats, {}, {}));
  const auto twice = samples(Metrics("fathom_").text("m", &stats, {}, {}));
  size_t renamed = 0;
  for (const auto& [name, value] : plain) {
    ASSERT_TRUE(twice.contains(name)) << name;
    if (!name.starts_with("vllm:")) continue;
    ++renamed;
    const std::string other = "fathom_" + name.substr(5);
    ASSERT_TRUE(twice.contains(other)) << other;
    EXPECT_EQ(twice.at(other), value) << other;
  }
  EXPECT_GT(renamed, 100u);
  EXPECT_EQ(twice.size(), plain.size() + renamed);
}

}  // namespace
}  // namespace fathom
