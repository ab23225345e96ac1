// What a rank decides by itself and not as the others do is found in the step where it happens,
// before a result of that step leaves: nodes are threads that are joined over loopback.
#include <gtest/gtest.h>

#include <functional>
#include <thread>

#include "comm/node_threads.h"
#include "e2e/golden.h"
#include "model/rank_team.h"

namespace fathom {
namespace {

// A step of one prompt of so many tokens on each lane, from its beginning.
std::vector<ForwardBatch> step_of(int lanes, int32_t tokens) {
  ForwardBatch batch;
  for (int32_t i = 0; i < tokens; ++i) {
    batch.token_ids.push_back(5 + i);
    batch.positions.push_back(i);
  }
  batch.query_start = {0, tokens};
  batch.context_lens = {0};
  batch.prompt_lens = {tokens};
  batch.block_tables = {0};
  batch.max_pages = 1;
  batch.logit_rows = {tokens - 1};
  return std::vector<ForwardBatch>(static_cast<size_t>(lanes), batch);
}

// Runs steps of 5, 6, 20 and 5 tokens on two nodes. change(1, options) and then(1, step, team) are
// node 1's own decisions. Returns what each step's end says, of node 0 (empty: it was well).
std::vector<std::string> run(
    const Placement& placement, const std::function<void(int node, RankTeamOptions&)>& change,
    const std::function<void(int node, int step, RankTeam&)>& then = [](int, int, RankTeam&) {}) {
  const auto checkpoint = Checkpoint::open(goldens_directory() + "v3");
  FATHOM_CHECK(checkpoint.has_value(), "{}", checkpoint.error().message);
  const int64_t vocab = checkpoint->config().vocab_size;
  const int lanes = placement.dp;
  RankTeamOptions options;
  options.placement = placement;
  options.num_pages = 1;
  options.num_threads = 1;
  options.load.show_progress = false;
  if (placement.exchanges_tokens()) {
    options.expert_table = std::make_shared<const ExpertTable>(
        ExpertTable::contiguous(checkpoint->config(), options.placement));
  }
  std::vector<std::string> ends;
  const TestListener listener;
  std::vector<std::thread> nodes;
  for (int node = 0; node < 2; ++node) {
    nodes.emplace_back([&, node] {
      AbortWord abort_word;
      const auto world =
          join(test_join_options(listener, 2, node, placement.world() / 2), abort_word);
      FATHOM_CHECK(world.has_value(), "{}", world.error().message);
      RankTeamOptions own = options;
      own.world = world->get();
      change(node, own);
      const auto team = RankTeam::load(*checkpoint, own);
      FATHOM_CHECK(team.has_value(), "{}", team.error().message);
      std::vector<float> logits(static_cast<size_t>(lanes * vocab));
      int step = 0;
      for (const int32_t tokens : {5, 6, 20, 5}) {
        then(node, step++, **team);
        int64_t rows = 0;
        for (int lane = 0; lane < lanes; ++lane) {
          rows += (*team)->has_rank(placement.rank_of(lane, 0)) ? 1 : 0;
        }
        const auto ran =
            (*team)->forward(step_of(lanes, tokens), TensorView(logits.data(), {rows, vocab}));
        if (node == 0) ends.push_back(ran ? "" : ran.error().message);
      }
    });
  }
  for (std::thread& node : nodes) node.join();
  return ends;
}

void expect_found_in_third(const std::vector<std::string>& ends, const std::string& collective) {
  ASSERT_EQ(ends.size(), 4);
  EXPECT_EQ(ends[0] + ends[1], "");
  for (const std::string& words :
       {std::string(" came to ") + collective, std::string(" with plan "), std::string("rank 0"),
        std::string("rank 1")}) {
    EXPECT_NE(ends[2].find(words), std::string::npos) << ends[2];
  }
  EXPECT_NE(ends[3], "");
}

TEST(NodePlans, AnEqualPlanIsNoError) {
  for (const Placement& placement :
       {Placement{.tp = 2}, Placement{.dp = 2, .expert_parallel = true}}) {
    const auto ends = run(placement, [](int, RankTeamOptions&) {});
    EXPECT_EQ(ends, std::vector<std::string>(4));
  }
}

// Node 1 takes the multi-head form only from 40 new tokens on, node 0 from 8: they compute 20 new
// tokens differently, with sums of equal sizes.
TEST(NodePlans, AnAttentionFormOfOnesOwnIsFoundInItsStep) {
  const auto ends = run({.tp = 2}, [](int node, RankTeamOptions& options) {
    options.model.attention.free_keys = 1000;
    options.model.attention.min_mha_queries = node == 0 ? 8 : 40;
  });
  expect_found_in_third(ends, "all_reduce");
}

// Node 1 moves two experts before the third step, node 0 does not.
TEST(NodePlans, ExpertsElsewhereAreFoundInTheirStep) {
  const auto ends = run(
      {.dp = 2, .expert_parallel = true}, [](int, RankTeamOptions&) {},
      [](int node, int step, RankTeam& team) {
        if (node == 0 || step != 2) return;
        ExpertLists lists = team.expert_table()->lists();
        std::swap(lists.back()[0].back(), lists.back()[1].back());
        auto table = ExpertTable::create(team.expert_table()->num_experts(), 2, lists, "");
        ASSERT_TRUE(team.place_experts(std::make_shared<const ExpertTable>(std::move(*table))));
      });
  expect_found_in_third(ends, "dispatch");
}

}  // namespace
}  // namespace fathom
