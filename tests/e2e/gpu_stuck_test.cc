// Steps that do not end, and engines that share a GPU. Run from the repository's root.
#include <gtest/gtest.h>

#include <thread>

#include "e2e/gpu_fixture.h"
#include "e2e/gpu_spin_cuda.h"
#include "engine/step_watchdog.h"

namespace fathom {
namespace {

using std::chrono::seconds;

// Begins a step of one token in an empty cache, by graph or by single launches.
Result<> begin_one(Runner& runner) {
  ForwardBatch batch;
  batch.token_ids = {5};
  batch.positions = batch.context_lens = batch.block_tables = batch.logit_rows = {0};
  batch.query_start = {0, 1};
  batch.prompt_lens = {1};
  batch.max_pages = 1;
  const SampleOptions greedy{.temperature = 0};
  const SampleRow row{.row = 0, .options = &greedy};
  return runner.begin({&batch, 1}, {&row, 1});
}

Result<> decode_one(Runner& runner) {
  FATHOM_RETURN_IF_ERROR(begin_one(runner));
  return runner.finish().map([](const auto&) {});
}

GpuRunnerOptions options_with(seconds timeout, bool graphs) {
  GpuRunnerOptions options = gpu_options();
  options.step_timeout = timeout;
  options.graphs = graphs;
  return options;
}

void run_beside_a_stuck_kernel(bool graphs) {
  const auto runner = on_gpu(options_with(seconds(2), graphs));
  if (!decode_one(*runner)) std::_Exit(1);
  occupy_gpu(seconds(0));
  const auto stuck = decode_one(*runner);
  std::_Exit(stuck ? 0 : 1);
}

TEST(GpuStuckDeathTest, AStepThatDoesNotEndEndsTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  for (const bool graphs : {true, false}) {
    EXPECT_EXIT(run_beside_a_stuck_kernel(graphs),
                testing::ExitedWithCode(StepWatchdog::kExitStuck),
                "step 1 .1 rows.; its kernels whose CTAs wait for one another: .*latent_decode.* "
                "has not ended within 2 s");
  }
}

TEST(GpuStuck, AStepThatIsLateEnds) {
  const auto runner = on_gpu(options_with(seconds(60), true));
  ASSERT_TRUE(decode_one(*runner));
  occupy_gpu(seconds(1));
  const auto late = decode_one(*runner);
  EXPECT_TRUE(late) << late.error().message;
}

// Without turns (device/cuda/device_turn.h) each engine's kernels may hold part of the SMs for
// ever: the watchdog would end the test.
TEST(GpuTwoEngines, OnOneDeviceAnswerAsAlone) {
  std::mt19937 random(3);
  std::vector<Request> requests;
  for (int i = 0; i < 200; ++i) {
    Request request;
    request.prompt_ids = random_prompt(random);
    request.sampling.temperature = 0;
    request.sampling.max_tokens = 64;
    requests.push_back(std::move(request));
  }
  GpuRunnerOptions options = options_with(seconds(60), true);
  options.deterministic = true;
  options.attention = AttentionForm::kAbsorbed;
  const auto alone = answers(*make_engine(options, {}), requests, true);
  std::vector<Answer> beside[2];
  {
    std::vector<std::jthread> engines;
    for (auto& its : beside) {
      engines.emplace_back([&] {
        // One engine's launches are batch-invariant, the other's are the fastest.
        GpuRunnerOptions own = options;
        own.deterministic = &its == &beside[0];
        its = answers(*make_engine(own, {}), requests, true);
      });
    }
  }
  for (size_t i = 0; i < alone.size(); ++i) {
    EXPECT_EQ(beside[0][i].ids, alone[i].ids) << i;
    EXPECT_EQ(beside[1][i].finish, alone[i].finish) << i;
  }
}

// The host goes on while a step and the save of a page behind it are in flight. A copy to pageable
// memory would block it until both have ended, however long the step takes; a busy host may miss a
// short one.
TEST(GpuStuck, ASaveDoesNotWaitForTheStep) {
  const auto runner = on_gpu(options_with(seconds(60), true));
  ASSERT_TRUE(decode_one(*runner));
  PageTransfer& transfer = *runner->page_transfer(0);
  const auto memory = transfer.allocate_slots(1);
  ASSERT_TRUE(memory) << memory.error().message;
  bool was_in_flight = false;
  for (int held = 1; held <= 16 && !was_in_flight; held *= 4) {
    occupy_gpu(seconds(held));
    ASSERT_TRUE(begin_one(*runner));
    transfer.save(0, (*memory)->data(), held);
    std::vector<EndedCopy> ended;
    transfer.take_ended(ended, /*wait=*/false);
    was_in_flight = ended.empty();
    ASSERT_TRUE(runner->finish());
    if (was_in_flight) transfer.take_ended(ended, /*wait=*/true);
    ASSERT_EQ(ended.size(), 1u);
    EXPECT_TRUE(ended[0].ok && ended[0].id == held);
  }
  EXPECT_TRUE(was_in_flight);
}

// The penalties' workspace has room for one row only: the step's rows are sampled in groups.
TEST(GpuPenalties, RowsInGroupsGiveTheSameTokens) {
  std::mt19937 random(4);
  std::vector<Request> requests;
  for (int i = 0; i < 48; ++i) {
    Request request;
    request.prompt_ids = random_prompt(random);
    if (request.prompt_ids.size() > 90) request.prompt_ids.resize(90);
    request.sampling.temperature = 0.7;
    request.sampling.seed = static_cast<uint64_t>(i);
    if (i % 4 != 3) request.sampling.repetition_penalty = 1.3;
    request.sampling.max_tokens = 30;
    requests.push_back(std::move(request));
  }
  GpuRunnerOptions options = options_with(seconds(60), true);
  options.deterministic = true;
  options.max_model_len = 128;
  const auto together = answers(*make_engine(options, {}), requests, true);
  options.penalty_room = 1;
  const auto in_groups = answers(*make_engine(options, {}), requests, true);
  for (size_t i = 0; i < requests.size(); ++i) EXPECT_EQ(in_groups[i].ids, together[i].ids) << i;
}

}  // namespace
}  // namespace fathom
