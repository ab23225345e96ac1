// The choice of kernels, without a GPU and without weights: configurations only.
#include "model/kernel_plan.h"

#include <fmt/format.h>
#include <gmock/gmock.h>

namespace fathom::cuda {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

Checkpoint published(const std::string& name) {
  auto opened =
      Checkpoint::open_dummy(fmt::format("{}/tests/data/configs/{}", FATHOM_SOURCE_DIR, name));
  FATHOM_CHECK(opened.has_value(), "{}", opened.error().message);
  return std::move(*opened);
}

// The TP8 slice of V3 in FP8: a dense layer, then three with experts.
class KernelPlanTest : public testing::Test {
 protected:
  Result<KernelPlan> plan(const SmBudget& budget = {}) {
    return plan_kernels(spec_, WeightForms(checkpoint_, stored_, {}), options_, budget);
  }

  const Checkpoint checkpoint_ = published("v3_eighth_layers");
  ModelSpec spec_ = make_spec(checkpoint_.config());
  StoredFp8 stored_ = StoredFp8::kKept;
  KernelOptions options_;
};

TEST_F(KernelPlanTest, ChoosesByWeights) {
  const auto made = plan();
  ASSERT_TRUE(made) << made.error().message;
  const WeightForm e4m3{DType::kF8E4M3};
  ASSERT_EQ(made->layers.size(), 4);
  EXPECT_EQ(made->layers[0],
            (LayerForms{e4m3, e4m3, e4m3, e4m3, e4m3, DType::kF8E4M3, DType::kF32, {}}));
  EXPECT_EQ(made->layers[3],
            (LayerForms{e4m3, e4m3, e4m3, e4m3, e4m3, DType::kF8E4M3, DType::kBF16, {}}));
  EXPECT_EQ(made->widths.dense, 2304);
  EXPECT_EQ(made->widths.routed, 256);
  EXPECT_EQ(made->widths.shared, 256);
  EXPECT_EQ(made->budget.sms, 132);
}

TEST_F(KernelPlanTest, RunsTheLastLayersInOneLaunch) {
  const auto made = plan();
  EXPECT_EQ(made->first_decode_layer, 1);  // the layers of experts
  EXPECT_EQ(made->decode_layers, DecodeLayersKind::kV3Tp8);
}

TEST_F(KernelPlanTest, RunsLayersApartWhereOneLaunchCannot) {
  const auto runs_apart = [&](const SmBudget& budget = {}) {
    const auto made = plan(budget);
    return made && made->decode_layers == DecodeLayersKind::kNone;
  };
  EXPECT_FALSE(runs_apart(SmBudget{}.limited_to(128)));
  EXPECT_TRUE(runs_apart(SmBudget{}.limited_to(127)));
  options_.batch_invariant = true;
  EXPECT_TRUE(runs_apart());
  options_.batch_invariant = false;
  stored_ = StoredFp8::kExpandedToBF16;
  EXPECT_TRUE(runs_apart());
  stored_ = StoredFp8::kKept;
  spec_.layers.back().moe->shared->gate.rows.count = 128;  // another shape
  EXPECT_TRUE(runs_apart());
}

// V2-Lite with all linear layers in INT4: what is not a routed expert is held in bf16.
TEST_F(KernelPlanTest, FourBitExpertsRunInLaunchesOfTheirOwn) {
  auto opened =
      Checkpoint::open_dummy(fmt::format("{}/bench/models/v2-lite-int4", FATHOM_SOURCE_DIR));
  ASSERT_TRUE(opened) << opened.error().message;
  const auto plan_of = [&](const ModelSpec& spec) {
    return plan_kernels(spec, WeightForms(*opened, stored_, {}), options_, SmBudget{});
  };
  const auto made = plan_of(make_spec(opened->config()));
  ASSERT_TRUE(made) << made.error().message;
  EXPECT_EQ(made->layers[1].four_bit_experts, FourBitCode::kInteger);
  EXPECT_EQ(made->layers[1].mlps, DType::kBF16);
  EXPECT_EQ(made->layers[0].four_bit_experts, std::nullopt);
  EXPECT_EQ(made->decode_layers, DecodeLayersKind::kNone);
  const Placement placement = {.tp = 2, .expert_parallel = true};
  const auto refused = plan_of(make_spec(
      opened->config(), placement, 0,
      std::make_shared<const ExpertTable>(ExpertTable::contiguous(opened->config(), placement))));
  ASSERT_FALSE(refused);
  EXPECT_THAT(refused.error().message, StartsWith("--enable-expert-parallel: "));
}

// V2-Lite's layers after the dense one, in the type of its weights.
TEST_F(KernelPlanTest, RunsV2LitesLayersInOneLaunch) {
  const auto kind_of = [&](const std::string& model) {
    auto opened =
        Checkpoint::open_dummy(fmt::format("{}/bench/models/{}", FATHOM_SOURCE_DIR, model));
    FATHOM_CHECK(opened.has_value(), "{}", opened.error().message);
    const auto made = plan_kernels(make_spec(opened->config()), WeightForms(*opened, stored_, {}),
                                   options_, SmBudget{});
    FATHOM_CHECK(made.has_value(), "{}", made.error().message);
    if (made->decode_layers != DecodeLayersKind::kNone) {
      EXPECT_EQ(made->first_decode_layer, 1);
    }
    return made->decode_layers;
  };
  EXPECT_EQ(kind_of("v2-lite"), DecodeLayersKind::kV2LiteBf16);
  EXPECT_EQ(kind_of("v2-lite-fp8"), DecodeLayersKind::kV2LiteE4M3);
  stored_ = StoredFp8::kExpandedToBF16;
  EXPECT_EQ(kind_of("v2-lite-fp8"), DecodeLayersKind::kV2LiteBf16);
  options_.batch_invariant = true;
  EXPECT_EQ(kind_of("v2-lite"), DecodeLayersKind::kNone);
}

// The layers before one that the launch does not read run apart.
TEST_F(KernelPlanTest, OneLaunchTakesTheLastLayersOnly) {
  spec_.layers[2].attention.o.cols.first = 64;  // inside a block: bf16
  const auto made = plan();
  ASSERT_TRUE(made) << made.error().message;
  EXPECT_EQ(made->layers[2].o.type, DType::kBF16);
  EXPECT_EQ(made->first_decode_layer, 3);
}

TEST_F(KernelPlanTest, TakesTheLibraryWhereItIsAndBitsMayDiffer) {
  EXPECT_FALSE(plan()->takes_library);
  options_.has_library = true;
  EXPECT_TRUE(plan()->takes_library);
  options_.batch_invariant = true;
  EXPECT_FALSE(plan()->takes_library);
}

TEST_F(KernelPlanTest, RefusesMoreSmsThanLaunchesFill) {
  const auto made = plan({133, {}});
  ASSERT_FALSE(made);
  EXPECT_EQ(made.error().message,
            "the number of the GPU's SMs is 133; kernels for GPUs take up to 132");
}

TEST_F(KernelPlanTest, RefusesBeforeAWeightIsRead) {
  const auto refusal = [&] {
    const auto made = plan();
    return made ? std::string() : made.error().message;
  };
  options_.cache_format = CacheFormat::kF32;
  EXPECT_THAT(refusal(), StartsWith("--kv-cache-dtype is float32"));
  options_.cache_format = CacheFormat::kFp8Scaled;
  EXPECT_EQ(refusal(), "");
  spec_.config.v_dim = 192;
  EXPECT_THAT(refusal(), StartsWith("config.json: v_head_dim is 192"));
}

TEST_F(KernelPlanTest, SparseAttentionHasNoLaunchOfSeveralLayers) {
  ASSERT_NE(plan()->decode_layers, DecodeLayersKind::kNone);
  spec_.config.indexer = {.num_heads = 64, .head_dim = 128, .topk = 2048};
  const auto made = plan();
  ASSERT_TRUE(made) << made.error().message;
  EXPECT_EQ(made->decode_layers, DecodeLayersKind::kNone);
}

// V3's launch for one token makes the sums over ranks, V2-Lite's does not.
TEST_F(KernelPlanTest, RanksMeetInV3sLaunchAndBetweenOthers) {
  spec_.placement = {.tp = 8};
  const auto made = plan();
  ASSERT_TRUE(made) << made.error().message;
  EXPECT_EQ(made->first_decode_layer, 1);
  EXPECT_EQ(made->decode_layers, DecodeLayersKind::kV3Tp8);
  const Checkpoint v2_lite = published("v2_lite_fp8_layers");
  ModelSpec spec = make_spec(v2_lite.config());
  const auto kind = [&] {
    const auto of = plan_kernels(spec, WeightForms(v2_lite, stored_, {}), options_, SmBudget{});
    return of ? of->decode_layers : DecodeLayersKind::kNone;
  };
  EXPECT_EQ(kind(), DecodeLayersKind::kV2LiteE4M3);
  spec.placement = {.tp = 2};
  EXPECT_EQ(kind(), DecodeLayersKind::kNone);
  const Checkpoint v3 = published("v3_two_layers");
  for (const int rank : {0, 7}) {
    spec_ = make_spec(v3.config(), {.tp = 8}, rank);
    const auto of_rank = plan_kernels(spec_, WeightForms(v3, stored_, {}), options_, SmBudget{});
    ASSERT_TRUE(of_rank) << of_rank.error().message;
    EXPECT_EQ(of_rank->widths.routed, 256);
    EXPECT_EQ(of_rank->widths.dense, 2304);
  }
}

// Whole experts, and no launch for one token, which would not meet the others.
TEST_F(KernelPlanTest, ExpertParallelRanksHaveWholeExperts) {
  const Placement placement = {.dp = 4, .expert_parallel = true};
  spec_ = make_spec(checkpoint_.config(), placement, 3,
                    std::make_shared<const ExpertTable>(
                        ExpertTable::contiguous(checkpoint_.config(), placement)));
  const auto made = plan();
  ASSERT_TRUE(made) << made.error().message;
  EXPECT_EQ(made->decode_layers, DecodeLayersKind::kNone);
  EXPECT_EQ(made->widths.routed, 256);
  EXPECT_EQ(made->widths.shared, 256);
  EXPECT_EQ(made->widths.dense, 2304);
}

TEST_F(KernelPlanTest, RefusesExpertTablesThatGpusDoNotTake) {
  const ModelConfig& config = checkpoint_.config();
  const Placement placement = {.dp = 2, .expert_parallel = true};
  const auto refusal = [&](const auto& change) {
    ExpertLists lists = ExpertTable::contiguous(config, placement).lists();
    change(lists[1]);
    auto table = ExpertTable::create(config.num_experts, 2, lists, "table");
    FATHOM_CHECK(table.has_value(), "{}", table.error().message);
    spec_ = make_spec(config, placement, 0, std::make_shared<const ExpertTable>(*table));
    const auto made = plan();
    return made ? std::string() : made.error().message;
  };
  EXPECT_EQ(refusal([](RankLists& ranks) { std::swap(ranks[0], ranks[1]); }), "");
  EXPECT_THAT(
      refusal([](RankLists& ranks) { ranks[1].push_back(3); }),
      StartsWith("--init-expert-location: expert 3 of layer 1 of those with experts has 2"));
  EXPECT_THAT(refusal([](RankLists& ranks) {
                ranks[0].insert(ranks[0].end(), ranks[1].begin(), ranks[1].end());
                ranks[1].clear();
              }),
              StartsWith("--init-expert-location: rank 1 has none of the experts of layer 1"));
}

TEST_F(KernelPlanTest, RefusesPlacementsThatGpusDoNotTake) {
  const auto refusal = [&](const Placement& placement) {
    const auto table = std::make_shared<const ExpertTable>(
        ExpertTable::contiguous(checkpoint_.config(), placement));
    spec_ = make_spec(checkpoint_.config(), placement, 1, table);
    const auto made = plan();
    return made ? std::string() : made.error().message;
  };
  EXPECT_EQ(refusal({.tp = 2}), "");
  EXPECT_EQ(refusal({.dp = 2}), "");
  EXPECT_EQ(refusal({.dp = 2, .expert_parallel = true}), "");
  EXPECT_EQ(refusal({.tp = 2, .dp = 4, .expert_parallel = true}), "");
  EXPECT_EQ(refusal({.tp = 3, .dp = 3, .expert_parallel = true}),
            "--enable-expert-parallel over 9 GPUs (--tp 3 x --dp 3): at most 8");
  EXPECT_EQ(refusal({.dp = 2, .expert_parallel = true, .redundant_experts = 2}),
            "--num-redundant-experts is 2: on GPUs each expert has one copy so far");
  EXPECT_EQ(refusal({.tp = 9}), "--tp is 9; kernels for GPUs take up to 8");
  spec_ = make_spec(checkpoint_.config(), {.tp = 4}, 3);
  spec_.config.vocab_size = 31;
  EXPECT_THAT(plan().error().message, StartsWith("vocab_size is 31; --tp 4"));
  spec_ = make_spec(checkpoint_.config(), {.tp = 4}, 3);
  for (MlpSpec& expert : spec_.layers.back().moe->experts) expert.gate.rows.count = 0;
  EXPECT_THAT(plan().error().message, HasSubstr("rank 3 has columns of the shared experts"));
  spec_ = make_spec(checkpoint_.config(), {.tp = 4}, 3);
  spec_.config.hidden = 8200;
  EXPECT_EQ(plan().error().message, "hidden_size is 8200; kernels for GPUs take up to 8192");
}

}  // namespace
}  // namespace fathom::cuda
