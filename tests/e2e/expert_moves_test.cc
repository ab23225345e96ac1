// Requests over expert-parallel ranks while their experts move and get copies: every token and
// every log-probability has the bits of one rank, with penalties, several choices, and sampling.
//
// Where a prompt is cut into chunks decides over last bits of its attention, and a lane cuts
// elsewhere than a single rank. Chunks, shared prefixes and preemption are therefore compared with
// the same lanes without expert parallelism.
#include <gtest/gtest.h>

#include <latch>
#include <numeric>
#include <thread>

#include "base/random.h"
#include "comm/node_threads.h"
#include "e2e/golden.h"
#include "engine/engine.h"
#include "engine/follower.h"
#include "engine/model_runner.h"

namespace fathom {
namespace {

constexpr int kRequests = 14;
constexpr int kEnd = 1;  // as good as any id: it ends some completions

struct Choice {
  std::vector<int32_t> ids;
  std::vector<float> logprobs;  // of the tokens and their alternatives
  std::optional<FinishReason> finish;
  bool operator==(const Choice&) const = default;
};

Request request_of(int number, int64_t vocab) {
  Request request;
  // Every third prompt shares its beginning with others.
  const auto seed = static_cast<uint64_t>(number);
  const int length = 5 + static_cast<int>(random_bits(1, seed, 0) % 150);
  for (int i = 0; i < length; ++i) {
    const uint64_t stream = number % 3 == 0 && i < 128 ? 0 : seed;
    request.prompt_ids.push_back(static_cast<int32_t>(
        2 + random_bits(2, stream, static_cast<uint64_t>(i)) % static_cast<uint64_t>(vocab - 2)));
  }
  request.sampling.seed = seed;
  request.sampling.temperature = number % 2 == 0 ? 0 : 1;
  request.sampling.repetition_penalty = number % 4 == 1 ? 1.2 : 1;
  request.sampling.max_tokens = 12 + number % 7;
  request.sampling.n = number % 5 == 4 ? 3 : 1;
  request.sampling.logprobs = 2;
  return request;
}

struct Completions {
  std::vector<Choice> choices;
  std::optional<ExpertStats> experts;
};

// What the engine does with prompts.
enum class Prompts { kWhole, kChunkedSharedAndPreempted };

Completions run_on(std::unique_ptr<Runner> runner, const ModelRunnerOptions& options,
                   Prompts prompts) {
  const int64_t vocab = runner->vocab_size();
  EngineOptions engine_options = {.max_num_seqs = 8, .eos_ids = {kEnd}};
  engine_options.max_batched_tokens = options.max_batched_tokens;
  engine_options.prefix_caching = false;
  if (prompts == Prompts::kChunkedSharedAndPreempted) {
    engine_options.max_batched_tokens = 48;
    engine_options.prefix_caching = true;
    engine_options.preempt_every = 9;
  }
  auto engine = Engine::create(engine_options, std::move(runner), nullptr);
  FATHOM_CHECK(engine.has_value(), "{}", engine.error().message);
  // The engine waits in this request's last event until all others are there: steps do not depend
  // on when they come.
  std::latch waits(1), submitted(1);
  Request first;
  first.prompt_ids = {5};
  first.sampling.max_tokens = 1;
  const auto first_id = (*engine)->submit(first, [&](const Event& event) {
    if (!event.last) return;
    waits.count_down();
    submitted.wait();
  });
  FATHOM_CHECK(first_id.has_value(), "{}", first_id.error().message);
  waits.wait();
  std::vector<std::vector<Choice>> of_requests(kRequests);
  std::latch ended(kRequests);
  for (int i = 0; i < kRequests; ++i) {
    Request request = request_of(i, vocab);
    auto& choices = of_requests[static_cast<size_t>(i)];
    choices.resize(static_cast<size_t>(request.sampling.n));
    const auto id = (*engine)->submit(std::move(request), [&](const Event& event) {
      Choice& choice = choices[static_cast<size_t>(event.index)];
      choice.ids.insert(choice.ids.end(), event.ids.begin(), event.ids.end());
      for (const TokenLogprob& token : event.logprobs) {
        choice.logprobs.push_back(token.logprob);
        for (const auto& [other, logprob] : token.top) choice.logprobs.push_back(logprob);
      }
      if (event.finish) choice.finish = event.finish;
      if (event.last) ended.count_down();
    });
    FATHOM_CHECK(id.has_value(), "{}", id.error().message);
  }
  submitted.count_down();
  ended.wait();
  Completions result;
  for (auto& choices : of_requests) {
    result.choices.insert(result.choices.end(), choices.begin(), choices.end());
  }
  result.experts = (*engine)->stats().experts;
  return result;
}

Completions run(const ModelRunnerOptions& options, Prompts prompts) {
  const auto checkpoint = Checkpoint::open(bundled_model());
  auto runner = ModelRunner::create(*checkpoint, options);
  FATHOM_CHECK(runner.has_value(), "{}", runner.error().message);
  return run_on(std::move(*runner), options, prompts);
}

// The same over nodes, which are threads and whose experts move.
Completions run_on_nodes(ModelRunnerOptions options, const std::vector<int>& ranks_of_node) {
  const auto checkpoint = Checkpoint::open(bundled_model());
  const TestListener listener;
  const auto join_node = [&](int node) {
    auto own = std::make_unique<NodeWorld>();
    auto world = join(test_join_options(listener, static_cast<int>(ranks_of_node.size()), node,
                                        ranks_of_node[static_cast<size_t>(node)]),
                      own->abort_word);
    FATHOM_CHECK(world.has_value(), "{}", world.error().message);
    own->world = std::move(*world);
    return own;
  };
  const auto load = [&](World& world) {
    ModelRunnerOptions own = options;
    own.world = &world;
    auto runner = ModelRunner::create(*checkpoint, own);
    FATHOM_CHECK(runner.has_value(), "{}", runner.error().message);
    return std::move(*runner);
  };
  std::vector<std::shared_ptr<const ExpertTable>> tables(ranks_of_node.size());
  std::vector<std::thread> followers;
  for (int node = 1; node < static_cast<int>(ranks_of_node.size()); ++node) {
    followers.emplace_back([&, node] {
      const auto own = join_node(node);
      const auto runner = load(*own->world);
      const auto done = follow_steps(*own, *runner, options.placement, options.max_batched_tokens);
      EXPECT_TRUE(done) << done.error().message;
      tables[static_cast<size_t>(node)] = runner->expert_table();
    });
  }
  auto own = join_node(0);
  auto runner = load(*own->world);
  const Completions completions =
      run_on(std::make_unique<LeadingRunner>(std::move(own), std::move(runner), options.placement,
                                             options.balancer),
             options, Prompts::kWhole);
  for (std::thread& follower : followers) follower.join();
  const ExpertTable first = ExpertTable::contiguous(checkpoint->config(), options.placement);
  for (size_t node = 1; node < tables.size(); ++node) {
    EXPECT_NE(tables[node]->fingerprint(), first.fingerprint()) << "no expert moved";
  }
  return completions;
}

ModelRunnerOptions options_of(const Placement& placement) {
  ModelRunnerOptions options;
  options.placement = placement;
  options.max_batched_tokens = 2048;
  options.max_total_tokens = 4096;
  options.num_threads = placement.world();
  options.load.show_progress = false;
  return options;
}

const Completions& of_one_rank() {
  static const Completions completions = run(options_of({}), Prompts::kWhole);
  return completions;
}

void expect_moves_change_no_bit(int ranks) {
  SCOPED_TRACE(testing::Message() << ranks << " ranks");
  ModelRunnerOptions options =
      options_of({.dp = ranks, .expert_parallel = true, .redundant_experts = ranks - 2});
  options.balancer = {.rebalances = true, .rebalance_steps = 3};
  const Completions moved = run(options, Prompts::kWhole);
  EXPECT_FALSE(of_one_rank().experts);
  EXPECT_TRUE(moved.choices == of_one_rank().choices);
  ASSERT_TRUE(moved.experts);
  EXPECT_GE(moved.experts->moves, 2);
  EXPECT_GT(moved.experts->tokens.front(), 0);
}

TEST(ExpertMoves, DoNotChangeABitOfAnyCompletion) { expect_moves_change_no_bit(4); }

TEST(ExpertMoves, DoNotChangeABitWithChunksPrefixesAndPreemption) {
  constexpr auto kPrompts = Prompts::kChunkedSharedAndPreempted;
  const Completions expected = run(options_of({.dp = 2}), kPrompts);
  ModelRunnerOptions options = options_of({.dp = 2, .expert_parallel = true});
  options.balancer = {.rebalances = true, .rebalance_steps = 3};
  const Completions moved = run(options, kPrompts);
  EXPECT_TRUE(moved.choices == expected.choices);
  EXPECT_GE(moved.experts->moves, 2);
}

// Not only the balancer's table changes.
TEST(ExpertMoves, RanksHaveTheTableThatIsTold) {
  const auto checkpoint = Checkpoint::open(bundled_model());
  ModelRunnerOptions options = options_of({.dp = 2, .expert_parallel = true});
  options.balancer = {.rebalances = true, .rebalance_steps = 1};
  const auto runner = ModelRunner::create(*checkpoint, options);
  ASSERT_TRUE(runner) << runner.error().message;
  const uint64_t first = (*runner)->expert_table()->fingerprint();
  ForwardBatch none, batch;
  none.query_start = {0};
  for (int32_t i = 0; i < 40; ++i) {
    batch.token_ids.push_back(5 + i);
    batch.positions.push_back(i);
  }
  batch.query_start = {0, 40};
  batch.context_lens = batch.block_tables = {0};
  batch.prompt_lens = {40};
  batch.max_pages = 1;
  const std::vector<ForwardBatch> lanes = {batch, none};
  ASSERT_TRUE((*runner)->begin(lanes, {}));
  ASSERT_TRUE((*runner)->finish());
  EXPECT_NE((*runner)->expert_table()->fingerprint(), first);
  EXPECT_EQ((*runner)->expert_table(), (*runner)->expert_stats()->table);
}

// Nodes read the weights of what moves to them, and count for node 0 what they route.
void expect_moves_between_nodes_change_no_bit(const std::vector<int>& ranks_of_node) {
  const int ranks = std::accumulate(ranks_of_node.begin(), ranks_of_node.end(), 0);
  SCOPED_TRACE(testing::Message() << ranks_of_node.size() << " nodes of " << ranks << " ranks");
  ModelRunnerOptions options =
      options_of({.dp = ranks, .expert_parallel = true, .redundant_experts = ranks - 2});
  options.num_threads = 1;
  options.balancer = {.rebalances = true, .rebalance_steps = 3};
  const Completions moved = run_on_nodes(options, ranks_of_node);
  EXPECT_TRUE(moved.choices == of_one_rank().choices);
  ASSERT_TRUE(moved.experts);
  EXPECT_GE(moved.experts->moves, 2);
  EXPECT_TRUE(moved.experts->tokens == run(options, Prompts::kWhole).experts->tokens);
}

TEST(ExpertMoves, BetweenNodesDoNotChangeABitOfAnyCompletion) {
  expect_moves_between_nodes_change_no_bit({1, 1});
  expect_moves_between_nodes_change_no_bit({2, 1});
}

// In `make test-slow`.
TEST(ExpertMoves, DISABLED_OverOtherNumbersOfRanksAndNodesDoNotChangeABitOfAnyCompletion) {
  expect_moves_change_no_bit(2);
  expect_moves_between_nodes_change_no_bit({1, 1, 1, 1});
  expect_moves_between_nodes_change_no_bit({3, 1});
}

// A placement of the user's own, which stays.
TEST(ExpertMoves, APlacementFileGivesTheSameCompletions) {
  const auto checkpoint = Checkpoint::open(bundled_model());
  const ModelConfig& config = checkpoint->config();
  RankLists ranks(2);
  for (int32_t e = 0; e < config.num_experts; ++e) ranks[e % 2 == 0 ? 1 : 0].push_back(e);
  const ExpertLists lists(static_cast<size_t>(num_moe_layers(config, false)), ranks);
  ModelRunnerOptions options = options_of({.dp = 2, .expert_parallel = true});
  options.expert_table =
      std::make_shared<const ExpertTable>(*ExpertTable::create(config.num_experts, 2, lists, ""));
  const Completions placed = run(options, Prompts::kWhole);
  EXPECT_TRUE(placed.choices == of_one_rank().choices);
  EXPECT_EQ(placed.experts->moves, 0);

  // One for other ranks is refused before anything is loaded.
  options.placement.dp = 4;
  const auto refused = ModelRunner::create(*checkpoint, options);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().message, "num_ranks is 2, the placement has tp * dp = 4");
}

}  // namespace
}  // namespace fathom
