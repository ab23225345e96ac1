// Drafts of a model with sparse attention (DeepSeek-V3.2) on the GPU, whose MTP layer chooses keys
// of its own: its logits against float32 on the CPU, and completions with and without drafts. Run
// from the repository's root.
#include <gtest/gtest.h>

#include "cache/latent_layout.h"
#include "e2e/gpu_deviation.h"
#include "e2e/gpu_fixture.h"
#include "e2e/gpu_mtp_trial.h"
#include "e2e/gpu_sparse_requests.h"
#include "e2e/test_configs.h"

namespace fathom {
namespace {

// Prompts and windows of up to 300 tokens, where rows choose 64 keys, and of up to 90, where they
// leave out few. Rounding that lets a row choose another key moves a random model's logits far.
void expect_as_near_as_the_cpu(const Checkpoint& checkpoint, CacheFormat format, int32_t longer) {
  const int64_t vocab = checkpoint.config().vocab_size;
  std::mt19937 random(8);
  std::vector<std::vector<int32_t>> texts;
  for (int t = 0; t < 6; ++t) texts.push_back(random_text(random, kMtpTextTokens, {1}).ids);
  const auto right_model = mtp_on_cpu(checkpoint, DType::kF32, CacheFormat::kF32),
             near_model = mtp_on_cpu(checkpoint, DType::kBF16, format),
             gpu_model = mtp_on_gpu(checkpoint, StoredFp8::kExpandedToBF16, format);
  const MtpTrace right = run_mtp(*right_model, texts, vocab, longer),
                 near = run_mtp(*near_model, texts, vocab, longer),
                 gpu = run_mtp(*gpu_model, texts, vocab, longer);
  const auto compare = [&](const auto& field, const char* what) {
    const Deviation cpu = deviation(near.*field, right.*field, what),
                    its = deviation(gpu.*field, right.*field, what);
    EXPECT_LE(its.logprobs, 1.5 * cpu.logprobs) << what;
    EXPECT_LE(its.other_tokens, 1.5 * cpu.other_tokens + 0.02) << what;
  };
  compare(&MtpTrace::main, "main logits");
  compare(&MtpTrace::first_drafts, "first drafts");
  compare(&MtpTrace::later_drafts, "later drafts");
}

class GpuSparseMtp : public testing::TestWithParam<CacheFormat> {};

TEST_P(GpuSparseMtp, LogitsAreAsNearToFloat32AsTheCpus) {
  for (const int32_t longer : {65, 12}) {
    expect_as_near_as_the_cpu(small_sparse_checkpoint(), GetParam(), longer);
  }
}

INSTANTIATE_TEST_SUITE_P(Of, GpuSparseMtp,
                         testing::Values(CacheFormat::kBF16, CacheFormat::kFp8Scaled,
                                         CacheFormat::kE4M3),
                         [](const auto& test) { return std::string(name_of(test.param)); });

TEST(GpuSparseMtpOfGlm, LogitsAreAsNearToFloat32AsTheCpus) {
  expect_as_near_as_the_cpu(small_glm_checkpoint(), CacheFormat::kBF16, 12);
}

// Weights are random, so drafts are right where the layer and the model draw by the same noise.
TEST(GpuSparseDrafts, ChangeNothing) {
  std::mt19937 random(9);
  auto requests = requests_around_the_threshold(random);
  for (size_t i = 0; i < requests.size(); ++i) {
    if (i % 3 == 0) continue;  // greedy
    requests[i].sampling.temperature = 2;
    requests[i].sampling.seed = random();
  }
  GpuRunnerOptions options = deterministic_sparse_options();
  const auto expected = answers(
      *make_engine(options, {.prefix_caching = false}, small_sparse_checkpoint()), requests, false);
  for (const int64_t drafts : {1, 3}) {
    SCOPED_TRACE(testing::Message() << drafts << " drafts");
    options = deterministic_sparse_options();
    options.max_drafts = drafts;
    EngineOptions always{.max_drafts = drafts, .adapts_drafts = false};
    auto engine = make_engine(options, always, small_sparse_checkpoint());
    expect_same_answers(answers(*engine, requests, true), expected);
    expect_same_answers(answers(*engine, requests, true), expected);
    const SpeculationStats stats = engine->stats().speculation;
    std::printf("%ld windows, %ld drafts accepted\n", static_cast<long>(stats.drafts),
                static_cast<long>(stats.accepted_tokens));
    EXPECT_GT(stats.accepted_tokens, 100);
    EXPECT_GT(engine->stats().prefix_hits, 2000);
    const auto lane = answers(
        *make_engine(ranks(2, 1, deterministic_sparse_options()), {}, small_sparse_checkpoint()),
        requests, true);
    expect_same_answers(
        answers(*make_engine(ranks(2, 1, options), always, small_sparse_checkpoint()), requests,
                true),
        lane);
    for (const int lanes : {1, 2}) {
      options.graphs = lanes == 1;
      expect_same_when_crowded(options, always, lanes, requests, expected);
    }
  }
}

}  // namespace
}  // namespace fathom
