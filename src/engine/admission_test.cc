#include "engine/admission.h"

#include <gtest/gtest.h>

#include <limits>

#include "engine/engine.h"
#include "engine/fake_runner.h"

namespace fathom {
namespace {

Result<std::unique_ptr<ActiveRequest>> admit(std::vector<int32_t> prompt,
                                             std::optional<int64_t> max_tokens,
                                             std::vector<std::string> stop = {}) {
  const AdmissionLimits limits{.vocab_size = 300,
                               .max_model_len = 1000,
                               .num_pages = 10,
                               .eos_ids = {},
                               .tokenizer = nullptr};
  Request request{.id = {}, .prompt_ids = std::move(prompt), .sampling = {}};
  request.sampling.max_tokens = max_tokens;
  request.sampling.stop = std::move(stop);
  return make_active_request(
      std::move(request), [](const Event&) {}, limits, 1);
}

void expect_refused(const Result<std::unique_ptr<ActiveRequest>>& result, const char* says) {
  ASSERT_FALSE(result) << says;
  EXPECT_EQ(result.error().code, Code::kInvalidArgument);
  EXPECT_NE(result.error().message.find(says), std::string::npos) << result.error().message;
}

std::vector<int32_t> tokens(int64_t count) {
  return std::vector<int32_t>(static_cast<size_t>(count), 7);
}

TEST(Admission, WhatCanNeverRunIsRefusedWithNumbers) {
  EXPECT_TRUE(admit(tokens(1), 1));
  expect_refused(admit({}, 1), "the prompt has no tokens");
  expect_refused(admit({1, 300}, 1), "prompt_ids[1] is 300, outside the vocabulary of 300");
  expect_refused(admit({-1}, 1), "prompt_ids[0] is -1");
  expect_refused(admit(tokens(1), 1, {"x"}), "no tokenizer");
  expect_refused(admit(tokens(1), 0), "max_tokens is 0");
  expect_refused(admit(tokens(990), 11),
                 "the prompt has 990 tokens and max_tokens is 11, together more than the context "
                 "of 1000 tokens");
  expect_refused(admit(tokens(1), std::numeric_limits<int64_t>::max()), "together more than");
  expect_refused(admit(tokens(1000), 1), "together more than");
}

TEST(Admission, TheCacheIsALimitToo) {
  // 10 pages hold 640 tokens; the last token of a completion is never cached.
  EXPECT_TRUE(admit(tokens(640), 1));
  expect_refused(admit(tokens(640), 2),
                 "max_tokens 2 need 11 pages of 64 tokens, the cache has 10");
  const auto open_ended = admit(tokens(600), std::nullopt);
  ASSERT_TRUE(open_ended);
  EXPECT_EQ((*open_ended)->sequences[0]->max_len, 641);
  expect_refused(admit(tokens(641), std::nullopt), "leaves no room to answer: the limit is 641");
}

TEST(Admission, BiasesOfOneIdAreSummed) {
  Request request{.id = {}, .prompt_ids = tokens(1), .sampling = {}};
  request.sampling.max_tokens = 1;
  request.sampling.logit_bias = {{5, 1.0f}, {3, 2.0f}, {5, 0.5f}};
  const auto active = make_active_request(
      std::move(request), [](const Event&) {},
      {.vocab_size = 300, .max_model_len = 1000, .num_pages = 10, .eos_ids = {}}, 1);
  ASSERT_TRUE(active);
  EXPECT_EQ((*active)->sequences[0]->sample_options.logit_bias,
            (std::vector<std::pair<int32_t, float>>{{3, 2.0f}, {5, 1.5f}}));
}

TEST(Admission, EngineOptionsAreChecked) {
  const auto create = [](EngineOptions options) {
    return Engine::create(std::move(options), std::make_unique<FakeRunner>(FakeModel{}), nullptr);
  };
  EXPECT_TRUE(create({}));
  for (const auto& [options, says] : std::vector<std::pair<EngineOptions, std::string>>{
           {{.max_num_seqs = 0}, "max_num_seqs is 0"},
           {{.max_num_seqs = 8, .max_batched_tokens = 7}, "max_batched_tokens is 7"},
           {{.long_prompt_rows = -2}, "long_prompt_rows is -2"},
           {{.max_prompt_logit_rows = 0}, "max_prompt_logit_rows is 0"},
           {{.max_queued_requests = 0}, "max_queued_requests is 0"},
           {{.max_queued_tokens = -1}, "max_queued_tokens is -1"},
           {{.max_queue_time = std::chrono::nanoseconds(-1)}, "max_queue_time is -1"},
           {{.max_total_time = std::chrono::nanoseconds(-5)}, "max_total_time is -5"},
           {{.eos_ids = {300}}, "end-of-sequence id 300"}}) {
    const auto result = create(options);
    ASSERT_FALSE(result) << says;
    EXPECT_NE(result.error().message.find(says), std::string::npos) << result.error().message;
  }
}

}  // namespace
}  // namespace fathom
