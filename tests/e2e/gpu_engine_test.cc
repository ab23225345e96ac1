// Random loads on the engine with the bundled model on the GPU, each row of each completion against
// float32. Run from the repository's root.
#include <gtest/gtest.h>

#include <future>
#include <random>

#include "cache/latent_layout.h"
#include "e2e/forced_answers.h"
#include "e2e/gpu_fixture.h"

namespace fathom {
namespace {

// GEMMs of the FP8 weights in bf16, or in e4m3, where a sum's last bits decide how an activation is
// rounded.
class GpuEngineProducts : public testing::TestWithParam<bool> {
 protected:
  GpuEngineProducts() {
    if (!GetParam()) options_.stored_fp8 = StoredFp8::kExpandedToBF16;
  }
  // An H200 is 0.011 off on average and 1.9 at most in bf16, 0.069 and 0.92 in e4m3; choices are up
  // to 2.5 behind float32's. Single rows are far off where rounding chooses another expert.
  static ForcedLimits limits() {
    return GetParam() ? ForcedLimits{.row = 4.5, .mean = 0.12}
                      : ForcedLimits{.row = 3.5, .mean = 0.02};
  }

  GpuRunnerOptions options_ = gpu_options();
};

TEST_P(GpuEngineProducts, EveryRowIsAsFloat32HasIt) {
  std::mt19937 random(3);
  const auto requests = random_requests(random, 120);
  expect_as_forced(requests, answers(*make_engine(options_, {}), requests, false), limits());
  expect_as_forced(requests, answers(*make_engine(options_, {}), requests, true), limits());
  // Few pages: sequences are preempted and recomputed, prefixes are cached and evicted.
  GpuRunnerOptions small = options_;
  small.max_total_tokens = 40 * kPageSize;
  auto engine = make_engine(small, {.preempt_every = 7});
  expect_as_forced(requests, answers(*engine, requests, true), limits());
  EXPECT_GT(engine->stats().preemptions, 5);
  EXPECT_EQ(engine->stats().pages_used, 0);
}

TEST_P(GpuEngineProducts, PagesComeBackFromHostMemory) {
  std::mt19937 random(4);
  auto requests = random_requests(random, 60);
  GpuRunnerOptions small = options_;
  small.max_total_tokens = 30 * kPageSize;
  auto engine = make_engine(small, {.kv_offload_bytes = 64 << 20});
  expect_as_forced(requests, answers(*engine, requests, true), limits());
  expect_as_forced(requests, answers(*engine, requests, true), limits());
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
