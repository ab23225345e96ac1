#include "e2e/gpu_sparse_requests.h"

#include <gtest/gtest.h>

#include "base/check.h"
#include "e2e/test_configs.h"

namespace fathom {

namespace {

Checkpoint opened(const char* name) {
  auto result = open_test_config(name);
  FATHOM_CHECK(result.has_value(), "{}", result.error().message);
  return std::move(*result);
}

}  // namespace

const Checkpoint& small_sparse_checkpoint() {
  static const Checkpoint checkpoint = opened("v32_small");
  return checkpoint;
}

const Checkpoint& small_glm_checkpoint() {
  static const Checkpoint checkpoint = opened("glm5_small");
  return checkpoint;
}

GpuRunnerOptions deterministic_sparse_options() {
  GpuRunnerOptions options = gpu_options();
  options.deterministic = true;
  options.attention = AttentionForm::kAbsorbed;
  return options;
}

std::vector<Request> requests_around_the_threshold(std::mt19937& random) {
  const auto ids = [&](size_t count) {
    std::vector<int32_t> some(count);
    for (int32_t& id : some) id = 3 + static_cast<int32_t>(random() % 8000);
    return some;
  };
  const std::vector<int32_t> prefix = ids(200);
  std::vector<Request> requests(40);
  for (size_t i = 0; i < requests.size(); ++i) {
    Request& request = requests[i];
    if (i % 2 == 0) request.prompt_ids.assign(prefix.begin(), prefix.begin() + 64 * (1 + i % 3));
    const auto rest = ids(1 + random() % 150);
    request.prompt_ids.insert(request.prompt_ids.end(), rest.begin(), rest.end());
    request.sampling.temperature = 0;
    request.sampling.max_tokens = 60;
    request.sampling.ignore_eos = true;
    request.sampling.logprobs = 2;
  }
  return requests;
}

void expect_same_answers(const std::vector<Answer>& actual, const std::vector<Answer>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(actual[i].ids, expected[i].ids) << "request " << i;
    ASSERT_EQ(actual[i].logprobs.size(), expected[i].logprobs.size()) << "request " << i;
    for (size_t t = 0; t < expected[i].logprobs.size(); ++t) {
      ASSERT_EQ(actual[i].logprobs[t].logprob, expected[i].logprobs[t].logprob)
          << "request " << i << ", token " << t;
    }
  }
}

void expect_same_when_crowded(GpuRunnerOptions options, EngineOptions engine, int lanes,
                              const std::vector<Request>& requests,
                              const std::vector<Answer>& expected) {
  SCOPED_TRACE(testing::Message() << lanes << " lanes");
  GpuRunnerOptions small = ranks(1, lanes, options);
  small.max_total_tokens = 40 * kPageSize / lanes;
  small.max_batched_tokens = 150;
  engine.kv_offload_bytes = 64 << 20;
  engine.preempt_every = 7;
  const auto crowded = make_engine(small, engine, small_sparse_checkpoint());
  expect_same_answers(answers(*crowded, requests, true), expected);
  expect_same_answers(answers(*crowded, requests, true), expected);
  EXPECT_GT(crowded->stats().preemptions, 5);
  EXPECT_GT(crowded->stats().prefix_returns, 0) << "pages from host memory";
  EXPECT_EQ(crowded->stats().pages_used, 0);
}

}  // namespace fathom
