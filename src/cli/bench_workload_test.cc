#include "cli/bench_workload.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>

namespace fathom {
namespace {

// A temporary file with this text.
class TextFile {
 public:
  explicit TextFile(const std::string& text)
      : path_(testing::TempDir() + "workload_" +
              testing::UnitTest::GetInstance()->current_test_info()->name()) {
    std::ofstream(path_) << text;
  }
  ~TextFile() { std::filesystem::remove(path_); }
  const std::string& path() const { return path_; }

 private:
  const std::string path_;
};

constexpr const char* kMooncake =
    R"({"timestamp": 0, "input_length": 1100, "output_length": 32, "hash_ids": [0, 1, 2]}
{"timestamp": 2000, "input_length": 1024, "output_length": 0, "hash_ids": [0, 3]}
)";

WorkloadOptions options_for(const std::string& dataset, const std::string& path) {
  WorkloadOptions options;
  options.dataset = dataset;
  options.path = path;
  options.vocab_size = 1000;
  return options;
}

std::vector<int32_t> first(const std::vector<int32_t>& ids, size_t count) {
  return {ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(count)};
}

TEST(Workload, MooncakeBlocksOfOneIdAreEqual) {
  const TextFile file(kMooncake);
  const auto requests = make_workload(options_for("mooncake", file.path()));
  ASSERT_TRUE(requests) << requests.error().message;
  ASSERT_EQ(requests->size(), 2u);
  const auto &a = (*requests)[0].prompt_ids, &b = (*requests)[1].prompt_ids;
  EXPECT_EQ(a.size(), 1100u);
  EXPECT_EQ(b.size(), 1024u);
  EXPECT_EQ(first(a, 512), first(b, 512));
  EXPECT_NE(a[512], b[512]);
  EXPECT_EQ((*requests)[0].output_tokens, 32);
  EXPECT_EQ((*requests)[1].output_tokens, 1);  // at least one token
  EXPECT_EQ((*requests)[1].at_seconds, 2);
}

TEST(Workload, RepeatedPrefixesAreShared) {
  WorkloadOptions options = options_for("prefix_repetition", "");
  options.num_prompts = 11;
  options.num_prefixes = 3;
  options.prefix_len = 20;
  options.suffix_len = 5;
  options.repetition_output_len = 7;
  const auto requests = make_workload(options);
  ASSERT_TRUE(requests) << requests.error().message;
  ASSERT_EQ(requests->size(), 9u);  // 3 per prefix
  std::set<std::vector<int32_t>> prefixes, prompts;
  for (const LoadRequest& request : *requests) {
    EXPECT_EQ(request.prompt_ids.size(), 25u);
    EXPECT_EQ(request.output_tokens, 7);
    prefixes.insert(first(request.prompt_ids, 20));
    prompts.insert(request.prompt_ids);
  }
  EXPECT_EQ(prefixes.size(), 3u);
  EXPECT_EQ(prompts.size(), 9u);
  options.num_prompts = 2;
  EXPECT_EQ(make_workload(options).error().message,
            "--num-prompts is 2, the least allowed is --prefix-repetition-num-prefixes, 3");
  WorkloadOptions random = options_for("random", "");
  random.num_prompts = 2;
  random.random_prefix_len = 8;
  random.random_input_len = 4;
  const auto shared = make_workload(random);
  ASSERT_TRUE(shared);
  EXPECT_EQ((*shared)[0].prompt_ids.size(), 12u);
  EXPECT_EQ(first((*shared)[0].prompt_ids, 8), first((*shared)[1].prompt_ids, 8));
  EXPECT_NE((*shared)[0].prompt_ids, (*shared)[1].prompt_ids);
}

TEST(Workload, ScalesShrinkBlocksAndTimes) {
  const TextFile file(kMooncake);
  WorkloadOptions options = options_for("mooncake", file.path());
  options.length_scale = 0.125;
  options.time_scale = 0.25;
  const auto requests = make_workload(options);
  ASSERT_TRUE(requests) << requests.error().message;
  const auto &a = (*requests)[0].prompt_ids, &b = (*requests)[1].prompt_ids;
  EXPECT_EQ(a.size(), 138u);  // 3 blocks of 64, scaled
  EXPECT_EQ(b.size(), 128u);
  EXPECT_EQ(first(a, 64), first(b, 64));
  EXPECT_NE(a[64], b[64]);
  EXPECT_EQ((*requests)[0].output_tokens, 4);
  EXPECT_EQ((*requests)[1].at_seconds, 0.5);
}

TEST(Workload, AzureComesAtItsTimes) {
  const TextFile file(
      "TIMESTAMP,ContextTokens,GeneratedTokens\n"
      "2023-11-16 23:59:59.5000000,374,44\r\n"
      "2023-11-17 00:00:01.0000000,396,109\n");
  const auto requests = make_workload(options_for("azure", file.path()));
  ASSERT_TRUE(requests) << requests.error().message;
  ASSERT_EQ(requests->size(), 2u);
  EXPECT_EQ((*requests)[0].at_seconds, 0);
  EXPECT_EQ((*requests)[0].prompt_ids.size(), 374u);
  EXPECT_EQ((*requests)[0].output_tokens, 44);
  EXPECT_DOUBLE_EQ((*requests)[1].at_seconds, 1.5);
  EXPECT_NE(first((*requests)[0].prompt_ids, 16), first((*requests)[1].prompt_ids, 16));
}

TEST(Workload, ShareGptAsksTheFirstQuestions) {
  const TextFile file(
      R"([{"conversations": [{"from": "human", "value": "One?"}, {"from": "gpt", "value": "12345678"}]},
          {"conversations": [{"from": "human", "value": "nobody answered"}]},
          {"conversations": [{"from": "human", "value": "Two?"}, {"from": "gpt", "value": "x"}]}])");
  const auto requests = make_workload(options_for("sharegpt", file.path()));
  ASSERT_TRUE(requests) << requests.error().message;
  ASSERT_EQ(requests->size(), 2u);
  EXPECT_EQ((*requests)[0].prompt_text, "One?");
  EXPECT_EQ((*requests)[0].output_tokens, 2);
  EXPECT_EQ((*requests)[1].prompt_text, "Two?");
  EXPECT_EQ((*requests)[1].output_tokens, 1);
}

TEST(Workload, ErrorsNameTheLine) {
  const std::tuple<const char*, const char*, const char*> cases[] = {
      {"azure", "2023-11-16 18:15:46,1,1\n2023-13-16 18:15:46,1,1\n", "line 2"},
      {"azure", "2023-11-16 18:15:46,1\n", "line 1"},
      {"azure", "2023-11-16 18:15:46,1,-1\n", "line 1"},
      {"azure", "", "no requests"},
      {"mooncake", "{}\n", "timestamp"},
      {"mooncake", R"({"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [0]})",
       "array of 2 ids"},
      {"mooncake", R"({"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": ["a"]})",
       "whole numbers"},
      {"sharegpt", "{}", "expected an array"},
      {"sharegpt", "[1]", "item 1"},
      {"sharegpt", R"([{"conversations": [1, 2]}])", "item 1"},
  };
  for (const auto& [dataset, text, expected] : cases) {
    const TextFile file(text);
    const auto requests = make_workload(options_for(dataset, file.path()));
    ASSERT_FALSE(requests) << text;
    EXPECT_NE(requests.error().message.find(expected), std::string::npos)
        << requests.error().message;
  }
  EXPECT_FALSE(make_workload(options_for("azure", "")));
}

TEST(Workload, RatesAndCancellationsAreAsAskedFor) {
  WorkloadOptions options = options_for("random", "");
  options.num_prompts = 4000;
  options.random_input_len = 10;
  options.range_ratio = 0.5;
  options.request_rate = 50;
  options.cancel_rate = 0.25;
  const auto poisson = make_workload(options);
  ASSERT_TRUE(poisson);
  EXPECT_NEAR(poisson->back().at_seconds, 80, 4);  // 3 standard deviations
  const auto cancelled = std::count_if(poisson->begin(), poisson->end(),
                                       [](const LoadRequest& one) { return one.cancelled; });
  EXPECT_NEAR(static_cast<double>(cancelled), 1000, 90);
  for (const LoadRequest& request : *poisson) {
    EXPECT_GE(request.prompt_ids.size(), 5u);
    EXPECT_LE(request.prompt_ids.size(), 15u);
  }
  options.burstiness = 100;  // nearly equal gaps: a tenth of a Poisson process's spread
  const auto steady = make_workload(options);
  ASSERT_TRUE(steady);
  for (size_t i = 1; i < steady->size(); ++i) {
    const double gap = (*steady)[i].at_seconds - (*steady)[i - 1].at_seconds;
    EXPECT_GT(gap, 0.01);
    EXPECT_LT(gap, 0.04);
  }
  EXPECT_EQ(make_workload(options)->back().at_seconds, steady->back().at_seconds);
}

}  // namespace
}  // namespace fathom
