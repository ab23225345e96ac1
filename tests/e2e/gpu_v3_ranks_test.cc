// Two layers of DeepSeek-V3 at full size (128 heads; one dense layer, one of 16 experts) with
// random FP8 weights over 2, 4 and 8 ranks, spread over the GPUs that there are: as near to float32
// as one rank, and the same bits again. Configuration: test_configs.h.
#include <gtest/gtest.h>

#include "e2e/gpu_deviation.h"
#include "e2e/gpu_fixture.h"
#include "e2e/test_configs.h"

namespace fathom {
namespace {

[[maybe_unused]] const bool kExpectsRanks = (expect_gpu_ranks(), true);

constexpr int32_t kVocab = 4096;

const Result<Checkpoint>& v3_layers() {
  static const Result<Checkpoint> opened = open_test_config("v3_two_layers");
  return opened;
}

// Prompts whole and in chunks over cached prefixes, and decode.
std::vector<Text> texts() {
  std::mt19937 random(11);
  std::vector<Text> result;
  const auto add = [&](int length, std::vector<int64_t> chunks) {
    result.push_back({{}, std::move(chunks)});
    while (std::ssize(result.back().ids) < length) {
      result.back().ids.push_back(static_cast<int32_t>(random() % kVocab));
    }
  };
  add(40, {30, 1});
  add(90, {60, 4, 2, 1});
  add(300, {280, 1});
  add(260, {150, 100, 1});
  return result;
}

struct Form {
  int tp;
  StoredFp8 stored_fp8;
  bool experts = false;
};

class GpuV3Ranks : public testing::TestWithParam<Form> {
 protected:
  void SetUp() override { ASSERT_TRUE(v3_layers().has_value()) << v3_layers().error().message; }
  static GpuRunnerOptions options(int tp, bool experts) {
    GpuRunnerOptions options = ranks(tp);
    options.stored_fp8 = GetParam().stored_fp8;
    options.placement.expert_parallel = experts;
    return options;
  }
};

INSTANTIATE_TEST_SUITE_P(
    Forms, GpuV3Ranks,
    testing::Values(Form{2, StoredFp8::kKept}, Form{4, StoredFp8::kExpandedToBF16},
                    Form{8, StoredFp8::kKept}, Form{8, StoredFp8::kExpandedToBF16},
                    Form{4, StoredFp8::kKept, true}, Form{8, StoredFp8::kKept, true}),
    [](const auto& test) {
      return fmt::format("Tp{}{}{}", test.param.tp,
                         test.param.stored_fp8 == StoredFp8::kKept ? "E4m3" : "Bf16",
                         test.param.experts ? "Ep" : "");
    });

TEST_P(GpuV3Ranks, AreAsNearToFloat32AsOneRankAndTheSameAgain) {
  static const auto right = run(*on_cpu(*v3_layers(), DType::kF32, CacheFormat::kF32), texts());
  const Deviation one =
      deviation(run(*on_gpu(options(1, false), *v3_layers()), texts()), right, "one rank");
  const auto runner = on_gpu(options(GetParam().tp, GetParam().experts), *v3_layers());
  const auto first = run(*runner, texts());
  const Deviation off = deviation(first, right, "ranks");
  EXPECT_LE(off.other_tokens, 1.3 * one.other_tokens + 0.005);
  EXPECT_LE(off.logprobs, 1.3 * one.logprobs + 0.002);
  expect_equal(run(*runner, texts()), first);
}

}  // namespace
}  // namespace fathom
