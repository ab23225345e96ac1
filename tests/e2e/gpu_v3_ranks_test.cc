// Layers of DeepSeek-V3 with random FP8 weights over ranks, spread over the GPUs that there are:
// two at full size (128 heads; one dense layer, one of 16 experts) over 2, 4 and 8 ranks as near to
// float32 as one rank, four of which each rank has a TP8 slice; the same bits again.
// Configurations: test_configs.h.
#include <gtest/gtest.h>

#include <optional>
#include <set>
#include <string>

#include "device/cuda/co_resident.h"
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

// Ranks that are TP8 slices of V3, 2 or 4. On a GPU each they take up to four tokens through all
// layers in one launch, and meet in it (ops/decode_layers); on shared GPUs they have a launch for
// each operation, as the others' would not be resident. Both forms are as far from bf16 weights;
// the names of the launches show which one ran.
struct Slices {
  int tp;
  const char* model;
  bool first_apart = false;  // the first rank has a GPU of its own, the others share one
};

class GpuV3Slices : public testing::TestWithParam<Slices> {};

INSTANTIATE_TEST_SUITE_P(Ranks, GpuV3Slices,
                         testing::Values(Slices{2, "v3_quarter_layers"},
                                         Slices{4, "v3_half_layers"},
                                         Slices{4, "v3_half_layers", true}),
                         [](const auto& test) {
                           return fmt::format("Tp{}{}", test.param.tp,
                                              test.param.first_apart ? "FirstApart" : "");
                         });

TEST_P(GpuV3Slices, TakeTokensThroughAllLayersAndTheSameAgain) {
  const auto [tp, model, first_apart] = GetParam();
  const auto opened = open_test_config(model);
  ASSERT_TRUE(opened.has_value()) << opened.error().message;
  std::mt19937 random(12);
  // Steps of four tokens, then of three, two and one.
  std::vector<Text> texts;
  for (const size_t length : {200, 150, 100, 50}) {
    Text& text = texts.emplace_back(Text{{}, {1}});
    while (text.ids.size() < length) text.ids.push_back(static_cast<int32_t>(random() % kVocab));
  }
  GpuRunnerOptions in_bf16 = ranks(1), apart = ranks(tp), options = ranks(tp);
  in_bf16.stored_fp8 = StoredFp8::kExpandedToBF16;
  apart.deterministic = true;
  if (first_apart) {
    if (options.devices[1] == 0) GTEST_SKIP() << "needs two GPUs";
    options.devices.assign(static_cast<size_t>(tp), 1);
    options.devices[0] = 0;
  }
  const auto right = run(*on_gpu(in_bf16, *opened), texts);
  const Deviation bound = deviation(run(*on_gpu(apart, *opened), texts), right, "by operations");
  const auto runner = on_gpu(options, *opened);
  const auto first = run(*runner, texts);
  const Deviation off = deviation(first, right, "ranks");
  EXPECT_LE(off.other_tokens, 1.3 * bound.other_tokens);
  EXPECT_LE(off.logprobs, 1.3 * bound.logprobs);
  expect_equal(run(*runner, texts), first);

  // Without graphs: the launches of each rank's steps but the last. The first rank's thread is the
  // caller's, whose log outlives the runner: a rank's first step begins a new one.
  std::vector<int> steps(static_cast<size_t>(tp)), in_one_launch(static_cast<size_t>(tp));
  options.graphs = false;
  options.at_rank = [&](int rank) {
    const auto at = static_cast<size_t>(rank);
    thread_local std::optional<cuda::CoResidentLog> log;
    if (steps[at]++ > 0 && log->text().find("decode_layers") != std::string::npos) {
      ++in_one_launch[at];
    }
    log.emplace();
  };
  expect_equal(run(*on_gpu(options, *opened), texts), first);
  const std::set<int> gpus(options.devices.begin(), options.devices.end());
  for (size_t rank = 0; rank < steps.size(); ++rank) {
    EXPECT_EQ(in_one_launch[rank], std::ssize(gpus) == tp ? steps[rank] - 1 : 0);
  }
}

}  // namespace
}  // namespace fathom
