// Data-parallel lanes as threads, without expert parallelism: every golden checkpoint and the
// bundled model. Lanes of one rank have the bits of one rank, lanes of several those of a single
// lane of as many; some lanes have nothing to do.
#include <gtest/gtest.h>

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
};

TEST_P(DataParallel, HasTheBitsOfASingleLane) {
  const auto checkpoint = open_golden(GetParam());
  const ModelConfig& config = checkpoint->config();
  for (const Form& form : forms(config)) {
    for (const int tp : {1, 2, 3, 4, 8}) {
      if (!check_placement({.tp = tp}, config) || 2 * tp > kMostRanks) continue;
      const Outcome expected = Ranks(*checkpoint, {.tp = tp}, form, nullptr).run();
      for (const int dp : {2, 3, 4, 8}) {
        if (tp > 1 ? tp * dp > kMostRanks : dp == 3) continue;
        SCOPED_TRACE(testing::Message() << "tp " << tp << ", dp " << dp << ", cache format "
                                        << static_cast<int>(form.cache));
        EXPECT_TRUE(Ranks(*checkpoint, {.tp = tp, .dp = dp}, form, nullptr).run() == expected);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Goldens, DataParallel,
                         testing::Values("fathom-tiny", "kimi", "odd", "v2_fp8_tensor", "v2_group",
                                         "v2lite", "v2_ct_channel", "v3", "v3_fp8", "v3_fp8_e8m0",
                                         "v3_fp8_ue8m0", "v3_yarn", "heads", "fp8_heads",
                                         "glm_lite", "youtu", "kimi_k25", "glm_dsa_shared"),
                         name_of_model);

}  // namespace
}  // namespace fathom
