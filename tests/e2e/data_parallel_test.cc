// Data-parallel lanes as threads, without expert parallelism: every golden checkpoint and the
// bundled model. Lanes of one rank have the bits of one rank, lanes of several those of a single
// lane of as many; some lanes have nothing to do. Every number of lanes is a slow test: sixteen
// ranks are threads of few cores.
#include <gtest/gtest.h>

#include <map>

#include "e2e/rank_harness.h"

namespace fathom {
namespace {

class DataParallel : public testing::TestWithParam<std::string> {
 protected:
  // Those of the three forms that the checkpoint and the room in this test leave.
  static std::vector<Form> forms(const ModelConfig& config) {
    std::vector<Form> forms = {{DType::kBF16, CacheFormat::kBF16}};
    // The bundled model is larger than all others together.
    if (GetParam() != "fathom-tiny") forms.push_back({DType::kF32, CacheFormat::kF32});
    if (config.kv_lora_rank % 128 == 0) forms.push_back({DType::kBF16, CacheFormat::kFp8Scaled});
    return forms;
  }

  // Numbers of lanes by the ranks of each.
  void expect_bits_of_a_single_lane(const std::map<int, std::vector<int>>& lanes) {
    const auto checkpoint = open_golden(GetParam());
    const ModelConfig& config = checkpoint->config();
    for (const Form& form : forms(config)) {
      for (const auto& [tp, dps] : lanes) {
        if (!check_placement({.tp = tp}, config)) continue;
        const Outcome expected = Ranks(*checkpoint, {.tp = tp}, form, nullptr).run();
        for (const int dp : dps) {
          SCOPED_TRACE(testing::Message() << "tp " << tp << ", dp " << dp << ", cache format "
                                          << static_cast<int>(form.cache));
          ASSERT_LE(tp * dp, kMostRanks);
          EXPECT_TRUE(Ranks(*checkpoint, {.tp = tp, .dp = dp}, form, nullptr).run() == expected);
        }
      }
    }
  }
};

TEST_P(DataParallel, HasTheBitsOfASingleLane) {
  if (GetParam() == "fathom-tiny") {
    expect_bits_of_a_single_lane({{1, {2}}, {2, {2}}});
  } else {
    expect_bits_of_a_single_lane({{1, {2, 8}}, {2, {2}}, {3, {2}}, {4, {2}}});
  }
}

// In `make test-slow`.
TEST_P(DataParallel, DISABLED_AnyNumberOfLanesHasTheBitsOfASingleLane) {
  expect_bits_of_a_single_lane(
      {{1, {2, 4, 8}}, {2, {2, 3, 4, 8}}, {3, {2, 3, 4}}, {4, {2, 3, 4}}, {8, {2}}});
}

INSTANTIATE_TEST_SUITE_P(Goldens, DataParallel,
                         testing::Values("fathom-tiny", "kimi", "odd", "v2_fp8_tensor", "v2_group",
                                         "v2lite", "v2_ct_channel", "v3", "v3_fp8", "v3_fp8_e8m0",
                                         "v3_fp8_ue8m0", "v3_yarn", "heads", "fp8_heads",
                                         "glm_lite", "youtu", "kimi_k25", "glm_dsa_shared"),
                         name_of_model);

}  // namespace
}  // namespace fathom
