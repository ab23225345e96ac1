// Random loads on the engine with the bundled model on the GPU. Run from the repository's root.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <future>
#include <random>

#include "cache/latent_layout.h"
#include "e2e/gpu_fixture.h"

namespace fathom {
namespace {

std::vector<Request> random_requests(std::mt19937& random, int count) {
  std::vector<Request> requests;
  for (int i = 0; i < count; ++i) {
    Request request;
    request.prompt_ids = random_prompt(random);
    // Greedy in more than one way: a draw would turn on the last bit of a probability.
    request.sampling.temperature = i % 3 == 0 ? 0.0 : 1.0;
    request.sampling.top_k = i % 3 == 0 ? 0 : 1;
    if (i % 7 == 0) request.sampling.frequency_penalty = 0.1;
    if (i % 5 == 0) request.sampling.logit_bias = {{200, 0.5f}};
    request.sampling.logprobs = 5;
    request.sampling.seed = random();
    request.sampling.max_tokens = 1 + static_cast<int64_t>(random() % 60);
    requests.push_back(std::move(request));
  }
  return requests;
}

// Rows are summed otherwise among others than alone: an answer may part from the one alone where
// two tokens are about as likely, and go its own way from there. Nowhere else. At least least_same
// percent are to be the same to the end.
void expect_parted_at_ties_only(const std::vector<Answer>& actual,
                                const std::vector<Answer>& expected, size_t least_same) {
  size_t same = 0, close = 0;
  for (size_t r = 0; r < expected.size(); ++r) {
    const Answer &ours = actual[r], &alone = expected[r];
    const auto [a, b] =
        std::mismatch(ours.ids.begin(), ours.ids.end(), alone.ids.begin(), alone.ids.end());
    if (a == ours.ids.end() && b == alone.ids.end()) {
      ++same;
      ++close;
      continue;
    }
    if (a == ours.ids.end() || b == alone.ids.end()) continue;  // not for its length
    const auto at = static_cast<size_t>(a - ours.ids.begin());
    const auto logprob_of = [&](int32_t id) {
      for (const auto& [top, logprob] : alone.logprobs[at].top) {
        if (top == id) return logprob;
      }
      return alone.logprobs[at].top.back().second;
    };
    close += std::abs(logprob_of(*a) - logprob_of(*b)) < 1.0f;
  }
  std::printf("%zu of %zu answers are the same, %zu part at a tie at most\n", same, expected.size(),
              close);
  EXPECT_GE(close, expected.size() * 95 / 100);
  EXPECT_GE(same, expected.size() * least_same / 100);
}

// Products of the FP8 weights in bf16, or in e4m3, where a sum's last bits decide how an activation
// is rounded: about half of the answers part somewhere, of those in bf16 one in ten.
class GpuEngineProducts : public testing::TestWithParam<bool> {
 protected:
  GpuEngineProducts() {
    if (!GetParam()) options_.stored_fp8 = StoredFp8::kExpandedToBF16;
  }
  size_t least_same() const { return GetParam() ? 40 : 80; }

  GpuRunnerOptions options_ = gpu_options();
};

TEST_P(GpuEngineProducts, RequestsAnswerAsIfAlone) {
  std::mt19937 random(3);
  const auto requests = random_requests(random, 120);
  const auto expected = answers(*make_engine(options_, {}), requests, false);
  expect_parted_at_ties_only(answers(*make_engine(options_, {}), requests, true), expected,
                             least_same());
  // Few pages: sequences are preempted and computed again, prefixes come and go.
  GpuRunnerOptions small = options_;
  small.max_total_tokens = 40 * kPageSize;
  auto engine = make_engine(small, {.preempt_every = 7});
  expect_parted_at_ties_only(answers(*engine, requests, true), expected, least_same());
  EXPECT_GT(engine->stats().preemptions, 5);
  EXPECT_EQ(engine->stats().pages_used, 0);
}

TEST_P(GpuEngineProducts, PagesComeBackFromHostMemory) {
  std::mt19937 random(4);
  auto requests = random_requests(random, 60);
  const auto expected = answers(*make_engine(options_, {}), requests, false);
  GpuRunnerOptions small = options_;
  small.max_total_tokens = 30 * kPageSize;
  auto engine = make_engine(small, {.kv_offload_bytes = 64 << 20});
  answers(*engine, requests, true);
  expect_parted_at_ties_only(answers(*engine, requests, true), expected, least_same());
  EXPECT_GT(engine->stats().prefix_returns, 0);
}

INSTANTIATE_TEST_SUITE_P(InE4m3, GpuEngineProducts, testing::Bool());

TEST(GpuEngine, AbortsLeaveNothing) {
  std::mt19937 random(5);
  auto engine = make_engine(gpu_options(), {});
  const auto requests = random_requests(random, 100);
  std::vector<std::future<void>> ends;
  for (const Request& request : requests) {
    auto done = std::make_shared<std::promise<void>>();
    ends.push_back(done->get_future());
    const auto id = engine->submit(request, [done](const Event& event) {
      if (event.last) done->set_value();
    });
    if (random() % 2 == 0) engine->abort(*id);
  }
  for (const auto& end : ends) end.wait();
  EXPECT_TRUE(engine->drain(std::chrono::seconds(10)));
  EXPECT_EQ(engine->stats().pages_used, 0);
}

}  // namespace
}  // namespace fathom
