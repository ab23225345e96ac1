// Ranks on GPUs, spread over those there are; one is shared by all of them: tensor parallelism,
// lanes and expert parallelism, with the bundled model. Tensor parallelism is as one rank up to
// rounding, and the same bits again; a lane's answers are those of one rank, also where experts are
// spread over the lanes. Run from the repository's root.
#include <gtest/gtest.h>

#include <chrono>
#include <random>
#include <thread>

#include "cache/latent_layout.h"
#include "e2e/forced_answers.h"
#include "e2e/gpu_deviation.h"
#include "e2e/gpu_fixture.h"

namespace fathom {
namespace {

[[maybe_unused]] const bool kExpectsRanks = (expect_gpu_ranks(), true);

struct Form {
  int tp;
  StoredFp8 stored_fp8;
  bool graphs;
};

class GpuTensorParallel : public testing::TestWithParam<Form> {
 protected:
  static GpuRunnerOptions options(int tp) {
    GpuRunnerOptions options = ranks(tp);
    options.stored_fp8 = GetParam().stored_fp8;
    options.graphs = GetParam().graphs;
    return options;
  }
};

std::string name_of(const testing::TestParamInfo<Form>& info) {
  const Form& f = info.param;
  return fmt::format("Tp{}{}{}", f.tp, f.stored_fp8 == StoredFp8::kKept ? "E4m3" : "Bf16",
                     f.graphs ? "" : "NoGraphs");
}

INSTANTIATE_TEST_SUITE_P(Forms, GpuTensorParallel,
                         testing::Values(Form{2, StoredFp8::kKept, true},
                                         Form{2, StoredFp8::kExpandedToBF16, true},
                                         Form{3, StoredFp8::kExpandedToBF16, true},
                                         Form{4, StoredFp8::kKept, true},
                                         Form{4, StoredFp8::kExpandedToBF16, false}),
                         name_of);

// Prompts whole, in chunks, over prefixes, and decode. On random text few positions are clear, so
// other tokens are frequent in any rounding: ranks differ as much from float32 as one rank does.
TEST_P(GpuTensorParallel, IsAsNearToFloat32AsOneRankAndTheSameAgain) {
  std::mt19937 random(3);
  const auto texts = random_texts(random);
  static const auto right =
      run(*on_cpu(bundled_checkpoint(), DType::kF32, CacheFormat::kF32), texts);
  const Deviation one = deviation(run(*on_gpu(options(1)), texts), right, "one rank");
  const auto runner = on_gpu(options(GetParam().tp));
  const auto first = run(*runner, texts);
  const Deviation off = deviation(first, right, "ranks");
  EXPECT_LE(off.other_tokens, 1.3 * one.other_tokens + 0.005);
  EXPECT_LE(off.logprobs, 1.3 * one.logprobs + 0.002);
  expect_equal(run(*runner, texts), first);
  expect_equal(run(*on_gpu(options(GetParam().tp)), texts), first);
}

struct Ranks {
  int tp, dp;
  bool experts = false;
};

// With whole experts spread over the ranks.
GpuRunnerOptions expert_ranks(int tp, int dp, GpuRunnerOptions options = gpu_options()) {
  options = ranks(tp, dp, std::move(options));
  options.placement.expert_parallel = true;
  return options;
}

class GpuRanksEngine : public testing::TestWithParam<Ranks> {};

INSTANTIATE_TEST_SUITE_P(Placements, GpuRanksEngine,
                         testing::Values(Ranks{2, 1}, Ranks{4, 1}, Ranks{1, 2}, Ranks{2, 2},
                                         Ranks{1, 4}, Ranks{2, 1, true}, Ranks{1, 2, true},
                                         Ranks{2, 2, true}, Ranks{1, 4, true}),
                         [](const auto& test) {
                           return fmt::format("Tp{}Dp{}{}", test.param.tp, test.param.dp,
                                              test.param.experts ? "Ep" : "");
                         });

// As GpuEngineProducts, in bf16.
TEST_P(GpuRanksEngine, EveryRowIsAsFloat32HasIt) {
  constexpr ForcedLimits kLimits = {.row = 3.5, .mean = 0.02};
  GpuRunnerOptions options = ranks(GetParam().tp, GetParam().dp);
  options.placement.expert_parallel = GetParam().experts;
  options.stored_fp8 = StoredFp8::kExpandedToBF16;
  std::mt19937 random(3);
  const auto requests = random_requests(random, 100);
  expect_as_forced(requests, answers(*make_engine(options, {}), requests, true), kLimits);
  // Few pages: sequences are preempted and recomputed, prefixes are cached, evicted, offloaded and
  // loaded again, on all ranks of a lane.
  GpuRunnerOptions small = options;
  small.max_total_tokens = 40 * kPageSize / GetParam().dp;
  auto engine = make_engine(small, {.kv_offload_bytes = 64 << 20, .preempt_every = 7});
  expect_as_forced(requests, answers(*engine, requests, true), kLimits);
  expect_as_forced(requests, answers(*engine, requests, true), kLimits);
  EXPECT_GT(engine->stats().preemptions, 5);
  EXPECT_GT(engine->stats().prefix_returns, 0);
  EXPECT_EQ(engine->stats().pages_used, 0);
}

void expect_equal(const std::vector<Answer>& actual, const std::vector<Answer>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(actual[i].ids, expected[i].ids) << "request " << i;
    ASSERT_EQ(actual[i].logprobs.size(), expected[i].logprobs.size());
    for (size_t t = 0; t < expected[i].logprobs.size(); ++t) {
      EXPECT_EQ(actual[i].logprobs[t].logprob, expected[i].logprobs[t].logprob);
    }
  }
}

GpuRunnerOptions deterministic() {
  GpuRunnerOptions options = gpu_options();
  options.deterministic = true;
  return options;
}

// What a request gets does not depend on its lane, and on what is in the other lanes.
TEST(GpuLanes, GiveTheBitsOfOneRank) {
  std::mt19937 random(4);
  const auto requests = random_requests(random, 40);
  expect_equal(answers(*make_engine(ranks(1, 3, deterministic()), {}), requests, true),
               answers(*make_engine(deterministic(), {}), requests, true));
}

// Sums of few rows and of many, which are made in different ways, have the same bits: alone most of
// a request's rows are summed at once, together they are divided over the ranks.
TEST(GpuTensorParallelDeterministic, ARequestsBitsDoNotDependOnTheOthers) {
  std::mt19937 random(6);
  const auto requests = random_requests(random, 40);
  for (const int tp : {2, 3}) {
    const auto engine = make_engine(ranks(tp, 1, deterministic()), {.prefix_caching = false});
    const auto alone = answers(*engine, requests, false);
    expect_equal(answers(*engine, requests, true), alone);
    expect_equal(answers(*make_engine(ranks(tp, 2, deterministic()), {}), requests, true), alone);
  }
}

// Experts of all lanes' ranks: whoever computes them, and whatever the other lanes have.
TEST(GpuExpertParallel, LanesGiveTheBitsOfOneRank) {
  std::mt19937 random(8);
  const auto requests = random_requests(random, 40);
  for (const StoredFp8 stored : {StoredFp8::kKept, StoredFp8::kExpandedToBF16}) {
    GpuRunnerOptions options = deterministic();
    options.stored_fp8 = stored;
    const auto alone = answers(*make_engine(options, {}), requests, true);
    for (const int dp : {2, 4}) {
      const auto engine = make_engine(expert_ranks(1, dp, options), {});
      expect_equal(answers(*engine, requests, true), alone);
      expect_equal(answers(*engine, requests, false), alone);  // other lanes have no rows
    }
    options.graphs = false;
    expect_equal(answers(*make_engine(expert_ranks(1, 3, options), {}), requests, true), alone);
  }
}

// Steps of more rows than a round takes.
TEST(GpuExpertParallel, RoundsChangeNoBit) {
  std::mt19937 random(9);
  const auto requests = random_requests(random, 60);
  GpuRunnerOptions options = deterministic();
  options.max_batched_tokens = 96;
  const auto alone = answers(*make_engine(options, {}), requests, true);
  const auto of_lanes = [&](int tp, int dp) {
    return answers(*make_engine(expert_ranks(tp, dp, options), {}), requests, true);
  };
  expect_equal(of_lanes(1, 4), alone);
  const auto of_pairs = of_lanes(2, 2);
  options.overlap_exchange = true;
  expect_equal(of_lanes(1, 4), alone);
  expect_equal(of_lanes(2, 2), of_pairs);
}

// Experts in another order, and not as many on each rank.
TEST(GpuExpertParallel, ATableChangesNoBit) {
  std::mt19937 random(10);
  const auto requests = random_requests(random, 30);
  const ModelConfig& config = bundled_checkpoint().config();
  ExpertLists lists;
  for (int64_t layer = 0; layer < num_moe_layers(config, false); ++layer) {
    std::vector<int32_t> order;
    for (int32_t e = 0; e < config.num_experts; ++e) order.push_back(e);
    std::shuffle(order.begin(), order.end(), random);
    RankLists of_ranks(2);
    for (size_t i = 0; i < order.size(); ++i) {
      of_ranks[layer % 2 == 0 ? i % 2 : (i % 4 == 0 ? 0 : 1)].push_back(order[i]);
    }
    lists.push_back(of_ranks);
  }
  auto table = ExpertTable::create(config.num_experts, 2, lists, "test");
  ASSERT_TRUE(table) << table.error().message;
  GpuRunnerOptions options = expert_ranks(1, 2, deterministic());
  options.expert_table = std::make_shared<const ExpertTable>(std::move(*table));
  expect_equal(answers(*make_engine(options, {}), requests, true),
               answers(*make_engine(deterministic(), {}), requests, true));
}

// The ranks of a lane have the same rows, of which each offers its share.
TEST(GpuExpertParallel, ARequestsBitsDoNotDependOnTheOthersOfTensorParallelRanks) {
  std::mt19937 random(6);
  const auto requests = random_requests(random, 40);
  const auto engine = make_engine(expert_ranks(2, 1, deterministic()), {.prefix_caching = false});
  const auto alone = answers(*engine, requests, false);
  expect_equal(answers(*engine, requests, true), alone);
  expect_equal(answers(*make_engine(expert_ranks(2, 2, deterministic()), {}), requests, true),
               alone);
}

ForwardBatch one_token() {
  ForwardBatch batch;
  batch.token_ids = {5};
  batch.positions = {0};
  batch.query_start = {0, 1};
  batch.context_lens = {0};
  batch.prompt_lens = {1};
  batch.max_pages = 1;
  batch.block_tables = {0};
  batch.logit_rows = {0};
  return batch;
}

// On the first lane.
Result<> one_step(Runner& runner) {
  static const SampleOptions greedy{.temperature = 0};
  std::vector<ForwardBatch> lanes(static_cast<size_t>(runner.num_lanes()));
  lanes.front() = one_token();
  const SampleRow row = {.options = &greedy};
  FATHOM_RETURN_IF_ERROR(runner.begin(lanes, {&row, 1}));
  FATHOM_TRY([[maybe_unused]] const auto tokens, runner.finish());
  return {};
}

// A rank whose thread fails: the others' launches end at once, the error is its own, and the runner
// is lost.
void expect_failure_ends_all(GpuRunnerOptions options, int missing) {
  bool fails = false;
  options.at_rank = [&](int rank) {
    if (fails && rank == missing) throw std::runtime_error("planted failure");
  };
  const auto runner = on_gpu(options);
  const auto first = one_step(*runner);
  ASSERT_TRUE(first) << first.error().message;
  fails = true;
  const auto begin = std::chrono::steady_clock::now();
  const auto failed = one_step(*runner);
  ASSERT_FALSE(failed);
  EXPECT_EQ(failed.error().message, "planted failure");
  EXPECT_TRUE(runner->is_lost());
  EXPECT_EQ(runner->loss().message, "planted failure");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(60));
  fails = false;
  EXPECT_FALSE(one_step(*runner));
}

TEST(GpuRankFaults, ARankThatFailsEndsTheStepOfAll) {
  for (const int missing : {0, 1, 2}) expect_failure_ends_all(ranks(3), missing);
}

// With experts on all lanes, of which the second has no rows.
TEST(GpuRankFaults, ARankWithExpertsThatFailsEndsTheStepOfAll) {
  for (const int missing : {0, 1, 3}) {
    GpuRunnerOptions options = expert_ranks(2, 2);
    options.step_timeout = std::chrono::seconds(40);
    expect_failure_ends_all(options, missing);
  }
}

// Rank 1 comes long after the other, who waits no longer than the limit and says for whom and
// where.
void expect_late_rank_is_named(GpuRunnerOptions options, const std::string& where) {
  options.step_timeout = std::chrono::seconds(8);
  bool sleeps = false;
  options.at_rank = [&](int rank) {
    if (sleeps && rank == 1) std::this_thread::sleep_for(std::chrono::seconds(6));
  };
  const auto runner = on_gpu(options);
  const auto first = one_step(*runner);
  ASSERT_TRUE(first) << first.error().message;
  sleeps = true;
  const auto failed = one_step(*runner);
  ASSERT_FALSE(failed);
  EXPECT_EQ(failed.error().message,
            fmt::format("rank 0 on cuda:0 waited 4 s for rank 1 on cuda:{} in {}",
                        options.devices[1], where));
  EXPECT_TRUE(runner->is_lost());
}

TEST(GpuRankFaults, ALateRankIsNamed) { expect_late_rank_is_named(ranks(2), "a sum over ranks"); }

TEST(GpuRankFaults, ALateRankWithExpertsIsNamed) {
  expect_late_rank_is_named(expert_ranks(1, 2), "an exchange of experts' rows");
}

TEST(GpuRankFaults, PlacementsThatDoNotFitAreRefused) {
  GpuRunnerOptions options = gpu_options();
  options.placement = {.tp = 2};
  const auto too_few = create_gpu_runner(bundled_checkpoint(), options);
  ASSERT_FALSE(too_few);
  EXPECT_EQ(too_few.error().message, "--device names 1 GPUs for 2 ranks (--tp 2 x --dp 1)");
}

}  // namespace
}  // namespace fathom
