// Requests on models with sparse attention (DeepSeek-V3.2, GLM-5.2) through the engine: whole
// prompts on one rank against chunked, shared and preempted ones, against pages that go to host
// memory and files and come back, against copies between lanes, drafts, and every placement of
// ranks.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <latch>
#include <map>

#include "base/random.h"
#include "checkpoint/test_files.h"
#include "e2e/golden.h"
#include "engine/engine.h"
#include "engine/model_runner.h"
#include "model/layer_options.h"

namespace fathom {
namespace {

constexpr int kRequests = 10;
constexpr int64_t kTopk = 16;  // of the goldens; a page has 64 tokens

struct Answer {
  std::vector<int32_t> ids;
  std::vector<float> logprobs;
  bool operator==(const Answer&) const = default;
};

// Prompts of 3 to 190 tokens; every other one begins with one of two texts of 140, two pages and
// more.
Request request_of(int number) {
  Request request;
  const auto token = [](int stream, int i) {
    return static_cast<int32_t>(
        3 + random_bits(7, static_cast<uint64_t>(stream), static_cast<uint64_t>(i)) % 150);
  };
  if (number % 2 == 1) {
    for (int i = 0; i < 140; ++i) request.prompt_ids.push_back(token(99 + number % 4, i));
  }
  const int more = number % 2 == 1 ? 5 * number : 3 + (kTopk - 5) * (number / 2);
  for (int i = 0; i < more; ++i) request.prompt_ids.push_back(token(number, i));
  request.sampling.temperature = 0;
  request.sampling.logprobs = 0;
  request.sampling.max_tokens = 12 + number;
  request.sampling.ignore_eos = true;
  return request;
}

struct Setting {
  Placement placement = {};
  std::optional<int64_t> dense_keys = {};
  int64_t drafts = 0;
  bool whole = true;            // else: chunks, shared prefixes, preemption
  int64_t total_tokens = 4096;  // of a lane's cache
  std::string offload_dir = {};
  AttentionForm form = AttentionForm::kAbsorbed;
};

struct Outcome {
  std::vector<Answer> answers;
  EngineStats stats;
};

// All requests, twice: the second time after those of the first have ended.
Outcome run_requests(const std::string& model, const Setting& setting) {
  const auto checkpoint = Checkpoint::open(goldens_directory() + model);
  FATHOM_CHECK(checkpoint.has_value(), "{}", checkpoint.error().message);
  ModelRunnerOptions options;
  options.placement = setting.placement;
  options.compute = DType::kF32;
  options.cache_format = CacheFormat::kF32;
  options.max_batched_tokens = setting.whole ? 2048 : 29;
  options.max_total_tokens = setting.total_tokens;
  options.attention.dense_keys = setting.dense_keys;
  options.attention.form = setting.form;
  options.max_drafts = setting.drafts;
  options.num_threads = setting.placement.world();
  options.load.show_progress = false;
  auto runner = ModelRunner::create(*checkpoint, options);
  FATHOM_CHECK(runner.has_value(), "{}", runner.error().message);
  EngineOptions engine_options = {.max_num_seqs = setting.whole ? 16 : 5};
  engine_options.max_batched_tokens = options.max_batched_tokens;
  engine_options.prefix_caching = !setting.whole;
  engine_options.preempt_every = setting.whole ? 0 : 7;
  if (!setting.offload_dir.empty()) {
    // A few pages; the rest goes to files.
    engine_options.kv_offload_bytes =
        3 * kPageSize * cache_token_bytes(checkpoint->config(), options.cache_format);
    engine_options.kv_offload_dir = setting.offload_dir;
    engine_options.kv_offload_disk_bytes = 1 << 26;
  }
  auto engine = Engine::create(engine_options, std::move(*runner), nullptr);
  FATHOM_CHECK(engine.has_value(), "{}", engine.error().message);
  Outcome outcome;
  for (int round = 0; round < 2; ++round) {
    std::vector<Answer> answers(kRequests);
    std::latch ended(kRequests);
    for (int i = 0; i < kRequests; ++i) {
      Answer& answer = answers[static_cast<size_t>(i)];
      const auto id = (*engine)->submit(request_of(i), [&answer, &ended](const Event& event) {
        answer.ids.insert(answer.ids.end(), event.ids.begin(), event.ids.end());
        for (const TokenLogprob& token : event.logprobs) answer.logprobs.push_back(token.logprob);
        if (event.last) ended.count_down();
      });
      FATHOM_CHECK(id.has_value(), "{}", id.error().message);
    }
    ended.wait();
    outcome.answers.insert(outcome.answers.end(), answers.begin(), answers.end());
  }
  outcome.stats = (*engine)->stats();
  EXPECT_EQ(outcome.stats.failed + outcome.stats.aborted, 0);
  return outcome;
}

class SparseRequests : public testing::TestWithParam<std::string> {
 protected:
  static Outcome run(const Setting& setting) { return run_requests(GetParam(), setting); }
  static const Outcome& one_rank() {
    static std::map<std::string, Outcome> outcomes;
    const auto [found, is_new] = outcomes.try_emplace(GetParam());
    if (is_new) found->second = run({});
    return found->second;
  }
  static void expect_near(const Outcome& actual);
};

void SparseRequests::expect_near(const Outcome& actual) {
  const std::vector<Answer>& expected = one_rank().answers;
  ASSERT_EQ(actual.answers.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(actual.answers[i].ids, expected[i].ids) << "answer " << i;
    ASSERT_EQ(actual.answers[i].logprobs.size(), expected[i].logprobs.size()) << "answer " << i;
    for (size_t k = 0; k < expected[i].logprobs.size(); ++k) {
      EXPECT_NEAR(actual.answers[i].logprobs[k], expected[i].logprobs[k], 1e-4) << "answer " << i;
    }
  }
}

TEST_P(SparseRequests, LongerThanTheThresholdAndRepeatable) {
  const auto half = static_cast<std::ptrdiff_t>(kRequests);
  const std::vector<Answer>& answers = one_rank().answers;
  EXPECT_TRUE(std::equal(answers.begin(), answers.begin() + half, answers.begin() + half));
  for (const Answer& answer : answers) EXPECT_GE(answer.ids.size(), 12u);
}

TEST_P(SparseRequests, TheThresholdChangesNoBit) {
  for (const int64_t dense : {int64_t{0}, kTopk / 2}) {
    EXPECT_TRUE(run({.dense_keys = dense}).answers == one_rank().answers) << dense;
  }
}

TEST_P(SparseRequests, ChunksPrefixesAndPreemptionChangeNoToken) {
  const Outcome outcome = run({.whole = false, .form = AttentionForm::kAuto});
  EXPECT_GT(outcome.stats.preemptions, 0);
  EXPECT_GT(outcome.stats.prefix_hits, 0);
  expect_near(outcome);
}

// An index key that a mover of pages left behind would change every answer beyond kTopk keys.
TEST_P(SparseRequests, PagesComeBackFromHostMemoryAndFiles) {
  const TestFolder folder;
  const Outcome outcome =
      run({.whole = false, .total_tokens = 5 * kPageSize, .offload_dir = folder.path()});
  EXPECT_GT(outcome.stats.prefix_returns, 0);
  expect_near(outcome);
}

TEST_P(SparseRequests, EveryPlacementGivesTheSameTokens) {
  for (const Placement& placement : {Placement{.tp = 2}, Placement{.tp = 3}, Placement{.dp = 2},
                                     Placement{.dp = 2, .expert_parallel = true},
                                     Placement{.tp = 2, .dp = 2, .expert_parallel = true}}) {
    SCOPED_TRACE(testing::Message() << "tp " << placement.tp << ", dp " << placement.dp << ", ep "
                                    << placement.expert_parallel);
    expect_near(run({.placement = placement}));
    expect_near(run({.placement = placement, .whole = false}));
  }
}

TEST_P(SparseRequests, DraftsChangeNoBit) {
  for (const int64_t drafts : {1, 2, 3}) {
    const Outcome outcome = run({.drafts = drafts});
    EXPECT_GT(outcome.stats.speculation.draft_tokens, 0);
    EXPECT_TRUE(outcome.answers == one_rank().answers) << drafts;
  }
  expect_near(run({.drafts = 3, .whole = false}));
  expect_near(run({.placement = {.tp = 2}, .drafts = 3, .whole = false}));
}

INSTANTIATE_TEST_SUITE_P(Goldens, SparseRequests, testing::Values("v32", "glm_dsa_shared"),
                         [](const auto& test) { return test.param; });

}  // namespace
}  // namespace fathom
