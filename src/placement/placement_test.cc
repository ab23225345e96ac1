#include "placement/placement.h"

#include <gtest/gtest.h>

#include <string_view>

#include "placement/split.h"
#include "placement/test_configs.h"

namespace fathom {
namespace {

void expect_allowed(const Placement& placement, const ModelConfig& config) {
  const auto checked = check_placement(placement, config);
  EXPECT_TRUE(checked) << checked.error().message;
}

void expect_refused(const Placement& placement, const ModelConfig& config,
                    std::string_view sentence) {
  const auto checked = check_placement(placement, config);
  ASSERT_FALSE(checked) << sentence;
  EXPECT_EQ(checked.error().code, Code::kInvalidArgument);
  EXPECT_EQ(checked.error().message, sentence);
}

TEST(Placement, RanksAreLaneByLane) {
  const Placement placement{.tp = 3, .dp = 2};
  EXPECT_EQ(placement.world(), 6);
  for (int rank = 0; rank < 6; ++rank) {
    const int lane = placement.lane_of(rank), tp_rank = placement.tp_rank_of(rank);
    EXPECT_EQ(lane, rank < 3 ? 0 : 1);
    EXPECT_EQ(tp_rank, rank % 3);
    EXPECT_EQ(placement.rank_of(lane, tp_rank), rank);
  }
}

TEST(Placement, AllowsAnyNumberOfRanksThatTheHeadsFill) {
  const ModelConfig v3 = published_config("deepseek_v3");
  expect_allowed({}, v3);
  for (const int tp : {2, 3, 5, 6, 7, 8, 12, 16, 63, 64}) expect_allowed({.tp = tp}, v3);
  expect_allowed({.dp = 64, .expert_parallel = true}, v3);
  expect_allowed({.tp = 4, .dp = 16}, v3);
  expect_allowed({.tp = 3, .dp = 2, .expert_parallel = true, .redundant_experts = 2}, v3);
  // Every expert on every rank.
  expect_allowed({.dp = 2, .expert_parallel = true, .redundant_experts = 256}, v3);
  // V2-Lite's experts have 11 blocks: five of 16 ranks have none.
  expect_allowed({.tp = 16}, published_config("deepseek_v2_lite"));
}

TEST(Placement, RefusesRanksOutOfRange) {
  const ModelConfig v3 = published_config("deepseek_v3");
  expect_refused({.tp = 0}, v3, "tp is 0, allowed are 1 to 64");
  expect_refused({.tp = 65}, v3, "tp is 65, allowed are 1 to 64");
  expect_refused({.dp = 0}, v3, "dp is 0, allowed are 1 to 64");
  expect_refused({.dp = -1}, v3, "dp is -1, allowed are 1 to 64");
  expect_refused({.dp = 2'000'000'000}, v3, "dp is 2000000000, allowed are 1 to 64");
  expect_refused({.tp = 5, .dp = 13}, v3, "tp * dp is 5 * 13 = 65 ranks, at most 64 are allowed");
}

TEST(Placement, RefusesARankWithoutTokens) {
  ModelConfig lite = published_config("deepseek_v2_lite");
  lite.vocab_size = 4;
  expect_allowed({.tp = 4}, lite);
  expect_refused({.tp = 5}, lite, "tp is 5, the model has 4 tokens (vocab_size): at most as many");
}

TEST(Placement, RefusesARankWithoutHeads) {
  ModelConfig lite = published_config("deepseek_v2_lite");
  expect_refused({.tp = 17}, lite,
                 "tp is 17, the model has 16 heads (num_attention_heads): at most 16");
  // Two heads fill a block of o_proj's columns and stay together.
  lite.v_dim = 64;
  lite.quantization.kind = QuantizationConfig::Kind::kFp8Block;
  lite.quantization.block_rows = lite.quantization.block_cols = 128;
  expect_allowed({.tp = 8}, lite);
  expect_refused({.tp = 9}, lite,
                 "tp is 9, the model has 16 heads (num_attention_heads), 2 at a time to fill whole "
                 "FP8 blocks of 128 columns (quantization_config.weight_block_size): at most 8");
  // The last rank of an odd number of heads has one.
  lite.num_heads = 15;
  expect_allowed({.tp = 8}, lite);
  EXPECT_EQ(split_heads(lite, 8, 7).count, 1);
}

TEST(Placement, RefusesExpertsThatDoNotFillTheRanks) {
  ModelConfig config = published_config("deepseek_v2_lite");
  config.num_experts = 6;
  Placement placement{.dp = 8, .expert_parallel = true};
  expect_refused(placement, config,
                 "enable-expert-parallel spreads 6 experts (n_routed_experts) and 0 redundant ones "
                 "over tp * dp = 8 ranks; num-redundant-experts must be at least 2");
  placement.redundant_experts = 1;
  EXPECT_FALSE(check_placement(placement, config));
  placement.redundant_experts = 2;
  expect_allowed(placement, config);
  placement.redundant_experts = 42;
  expect_allowed(placement, config);
  placement.redundant_experts = 43;
  expect_refused(
      placement, config,
      "num-redundant-experts is 43, allowed are 0 to 42 (6 experts of n_routed_experts on 8 "
      "ranks)");
  placement.redundant_experts = -1;
  EXPECT_FALSE(check_placement(placement, config));
}

TEST(Placement, RefusesExpertParallelismThatHasNoMeaning) {
  ModelConfig config = published_config("deepseek_v2_lite");
  expect_refused({.dp = 2, .redundant_experts = 1}, config,
                 "num-redundant-experts is 1, without enable-expert-parallel only 0 is allowed");
  config.num_experts = 0;
  expect_allowed({.dp = 2}, config);
  expect_refused({.dp = 2, .expert_parallel = true}, config,
                 "enable-expert-parallel is on, the model has no experts (n_routed_experts)");
}

TEST(Placement, CountsLayersWithExperts) {
  const ModelConfig v3 = published_config("deepseek_v3");
  EXPECT_EQ(num_moe_layers(v3, false), 58);
  EXPECT_EQ(num_moe_layers(v3, true), 59);
  EXPECT_EQ(num_moe_layers(published_config("deepseek_v2_lite"), true), 26);
  ModelConfig every_second = v3;
  every_second.moe_layer_freq = 2;
  EXPECT_EQ(num_moe_layers(every_second, false), 29);
  every_second.num_experts = 0;
  EXPECT_EQ(num_moe_layers(every_second, true), 0);
}

}  // namespace
}  // namespace fathom
