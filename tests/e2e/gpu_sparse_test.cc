// Sparse attention (DeepSeek-V3.2) on the GPU: a small model of random weights against the CPU and
// against itself, and needles in a haystack. Run from the repository's root.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <string>

#include "cache/latent_layout.h"
#include "checkpoint/test_files.h"
#include "e2e/gpu_deviation.h"
#include "e2e/gpu_fixture.h"
#include "e2e/gpu_sparse_requests.h"
#include "e2e/haystack.h"

namespace fathom {
namespace {

[[maybe_unused]] const bool kExpectsRanks = (expect_gpu_ranks(), true);

// 3 layers, 16 heads, 64 index heads; rows choose 64 keys.
constexpr int64_t kTopKeys = 64;

GpuRunnerOptions options_of(std::optional<int64_t> dense_keys, bool deterministic) {
  GpuRunnerOptions options = gpu_options();
  options.dense_keys = dense_keys;
  options.deterministic = deterministic;
  if (deterministic) options.attention = AttentionForm::kAbsorbed;
  return options;
}

// Prompts whole and in chunks, below, at and above the threshold, and decode through it.
std::vector<Text> texts_around_the_threshold(std::mt19937& random) {
  std::vector<Text> texts;
  const auto add = [&](size_t length, std::vector<int64_t> chunks) {
    texts.push_back(random_text(random, length, std::move(chunks)));
  };
  add(63, {63});
  add(64, {64});
  add(65, {65});
  add(80, {50, 1});
  add(150, {60, 4, 2, 1});
  add(500, {300, 100, 1});
  add(260, {13});
  add(700, {700});
  for (int i = 0; i < 6; ++i) add(70 + random() % 30, {1 + static_cast<int64_t>(random() % 60), 1});
  return texts;
}

TEST(GpuSparse, IsAsNearToFloat32AsTheCpu) {
  std::mt19937 random(2);
  const auto texts = texts_around_the_threshold(random);
  const Checkpoint& checkpoint = small_sparse_checkpoint();
  const auto right = run(*on_cpu(checkpoint, DType::kF32, CacheFormat::kF32), texts);
  const Deviation cpu =
      deviation(run(*on_cpu(checkpoint, DType::kBF16, CacheFormat::kBF16), texts), right, "CPU");
  for (const auto& [name, form] : {std::pair("GPU, by cost", AttentionForm::kAuto),
                                   std::pair("GPU, absorbed", AttentionForm::kAbsorbed)}) {
    GpuRunnerOptions options = options_of({}, false);
    options.stored_fp8 = StoredFp8::kExpandedToBF16;
    options.attention = form;
    const Deviation gpu = deviation(run(*on_gpu(options, checkpoint), texts), right, name);
    EXPECT_LE(gpu.logprobs, 1.5 * cpu.logprobs) << name;
    EXPECT_LE(gpu.other_tokens, 1.5 * cpu.other_tokens + 0.01) << name;
  }
}

class GpuSparseCaches : public testing::TestWithParam<CacheFormat> {};

// Also with every row choosing, so that lists are shorter than a tile and than what a row may
// choose.
TEST_P(GpuSparseCaches, AreAsNearToFloat32AsTheCpus) {
  std::mt19937 random(3);
  const auto texts = texts_around_the_threshold(random);
  const Checkpoint& checkpoint = small_sparse_checkpoint();
  const auto right = run(*on_cpu(checkpoint, DType::kF32, CacheFormat::kF32), texts);
  const Deviation cpu =
      deviation(run(*on_cpu(checkpoint, DType::kBF16, GetParam()), texts), right, "CPU");
  for (const std::optional<int64_t> dense_keys : {std::optional<int64_t>(), {0}}) {
    for (const bool deterministic : {false, true}) {
      GpuRunnerOptions options = options_of(dense_keys, deterministic);
      options.stored_fp8 = StoredFp8::kExpandedToBF16;
      options.cache_format = GetParam();
      const std::string name = std::string(dense_keys ? "every row chooses" : "GPU") +
                               (deterministic ? ", deterministic" : "");
      const Deviation gpu =
          deviation(run(*on_gpu(options, checkpoint), texts), right, name.c_str());
      EXPECT_LE(gpu.logprobs, 1.5 * cpu.logprobs) << name;
      EXPECT_LE(gpu.other_tokens, 1.5 * cpu.other_tokens + 0.01) << name;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Of, GpuSparseCaches,
                         testing::Values(CacheFormat::kFp8Scaled, CacheFormat::kE4M3,
                                         CacheFormat::kE5M2),
                         [](const auto& test) { return std::string(name_of(test.param)); });

// Heads of other widths than 128 have absorbed attention alone.
TEST(GpuSparse, HeadsOfGlmAreAsNearToFloat32AsTheCpus) {
  std::mt19937 random(11);
  const auto texts = texts_around_the_threshold(random);
  const Checkpoint& checkpoint = small_glm_checkpoint();
  const auto right = run(*on_cpu(checkpoint, DType::kF32, CacheFormat::kF32), texts);
  for (const CacheFormat format : {CacheFormat::kBF16, CacheFormat::kFp8Scaled}) {
    const Deviation cpu =
        deviation(run(*on_cpu(checkpoint, DType::kBF16, format), texts), right, "CPU");
    for (const int tp : {1, 2}) {
      GpuRunnerOptions options = ranks(tp, 1, options_of({}, false));
      options.stored_fp8 = StoredFp8::kExpandedToBF16;
      options.cache_format = format;
      const Deviation gpu = deviation(run(*on_gpu(options, checkpoint), texts), right, "GPU");
      EXPECT_LE(gpu.logprobs, 1.5 * cpu.logprobs) << tp << " ranks, " << name_of(format);
      EXPECT_LE(gpu.other_tokens, 1.5 * cpu.other_tokens + 0.01)
          << tp << " ranks, " << name_of(format);
    }
  }
  GpuRunnerOptions options = options_of({}, false);
  options.attention = AttentionForm::kMha;
  const auto refused = create_gpu_runner(checkpoint, options);
  ASSERT_FALSE(refused);
  EXPECT_TRUE(refused.error().message.starts_with("--attention is mha")) << refused.error().message;
}

// Weights that stay in FP8, and what batches, prefixes and preemption do to a row's bits: nothing.
TEST(GpuSparse, HeadsOfGlmDoNotDependOnTheBatch) {
  std::mt19937 random(12);
  const auto requests = requests_around_the_threshold(random);
  GpuRunnerOptions options = options_of({}, true);
  const auto expected = answers(
      *make_engine(options, {.prefix_caching = false}, small_glm_checkpoint()), requests, false);
  options.max_total_tokens = 40 * kPageSize;
  options.max_batched_tokens = 150;
  auto crowded = make_engine(options, {.preempt_every = 7}, small_glm_checkpoint());
  expect_same_answers(answers(*crowded, requests, true), expected);
  EXPECT_GT(crowded->stats().preemptions, 5);
}

// A row that sees no more keys than it chooses has the bits of one that had to choose them all, in
// a short graph, in a long one and in none. Without --deterministic short steps read whole pages.
TEST(GpuSparse, TheThresholdChangesNoBit) {
  std::mt19937 random(4);
  const auto texts = texts_around_the_threshold(random);
  GpuRunnerOptions options = options_of({}, true);
  const auto expected = run(*on_gpu(options, small_sparse_checkpoint()), texts);
  for (const int64_t dense_keys : {int64_t{0}, int64_t{40}, kTopKeys - 1}) {
    options.dense_keys = dense_keys;
    SCOPED_TRACE(testing::Message() << dense_keys << " keys");
    expect_equal(run(*on_gpu(options, small_sparse_checkpoint()), texts), expected);
  }
  options.dense_keys = {};
  options.graphs = false;
  expect_equal(run(*on_gpu(options, small_sparse_checkpoint()), texts), expected);
}

// Prompts in any chunks, and texts alone: the same bits under --deterministic, with multi-head
// attention below the threshold too.
TEST(GpuSparse, DeterministicBitsDoNotDependOnChunksAndNeighbours) {
  std::mt19937 random(5);
  for (const AttentionForm form : {AttentionForm::kAbsorbed, AttentionForm::kAuto}) {
    GpuRunnerOptions options = options_of({}, true);
    options.attention = form;
    const auto runner = on_gpu(options, small_sparse_checkpoint());
    std::vector<Text> texts;
    for (const size_t length : {66, 200, 600}) texts.push_back(random_text(random, length, {600}));
    const auto whole = run(*runner, texts);
    for (size_t t = 0; t < texts.size(); ++t) {
      expect_equal(run(*runner, {texts[t]}), {whole[t]});
    }
    const std::vector<std::vector<int64_t>> cuts = {{13}, {50}, {63},
                                                    {64}, {65}, {60, 2, 3, 130, 1}};
    for (const auto& chunks : cuts) {
      for (Text& text : texts) text.chunks = chunks;
      SCOPED_TRACE(testing::Message() << "chunks of " << testing::PrintToString(chunks));
      expect_equal(run(*runner, texts), whole);
    }
  }
}

// The likeliest token is the answer, clearly.
int64_t count_found(const Haystack& haystack, const std::vector<SampledToken>& tokens) {
  int64_t found = 0;
  for (const Asked& asked : haystack.asked) {
    const SampledToken& token = tokens[static_cast<size_t>(asked.position)];
    const bool is_found =
        token.id == asked.answer && token.top[0].second - token.top[1].second > 1.0f;
    found += is_found ? 1 : 0;
    if (is_found) continue;
    std::printf("asked at %ld for needles at %ld and %ld: %d, not %d\n", asked.position,
                asked.first, asked.second, token.id, asked.answer);
  }
  return found;
}

class GpuSparseNeedles : public testing::TestWithParam<CacheFormat> {};

TEST_P(GpuSparseNeedles, AreFound) {
  const auto checkpoint = Checkpoint::open("tests/data/needle_wide");
  ASSERT_TRUE(checkpoint) << checkpoint.error().message;
  for (const int64_t length : {4096, 16384, 32768}) {
    for (const std::optional<int64_t> dense_keys : {std::optional<int64_t>(), {0}}) {
      const Haystack haystack(length);
      // The last question is a step of decode.
      const std::vector<int64_t> chunks = {2048, length <= 4096 ? 2047 : 2048, 1};
      Text text{haystack.ids, length <= 4096 ? chunks : std::vector<int64_t>{2048}};
      GpuRunnerOptions options = options_of(dense_keys, false);
      options.cache_format = GetParam();
      const auto tokens = run(*on_gpu(options, *checkpoint), {text});
      EXPECT_EQ(count_found(haystack, tokens[0]), kQuestions)
          << length << " keys, threshold " << dense_keys.value_or(-1);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Of, GpuSparseNeedles,
                         testing::Values(CacheFormat::kBF16, CacheFormat::kFp8Scaled,
                                         CacheFormat::kE4M3, CacheFormat::kE5M2),
                         [](const auto& test) { return std::string(name_of(test.param)); });

// Ranks that each choose the keys of all rows, and lanes, on the GPUs that there are.
TEST(GpuSparse, RanksAreAsNearToFloat32AsOneAndTheSameAgain) {
  std::mt19937 random(6);
  const auto texts = texts_around_the_threshold(random);
  const auto right = run(*on_cpu(small_sparse_checkpoint(), DType::kF32, CacheFormat::kF32), texts);
  const auto options = [](int tp) {
    GpuRunnerOptions its = ranks(tp);
    its.stored_fp8 = StoredFp8::kExpandedToBF16;
    return its;
  };
  const Deviation one =
      deviation(run(*on_gpu(options(1), small_sparse_checkpoint()), texts), right, "one rank");
  for (const int tp : {2, 4}) {
    const auto runner = on_gpu(options(tp), small_sparse_checkpoint());
    const auto first = run(*runner, texts);
    const Deviation off = deviation(first, right, "ranks");
    EXPECT_LE(off.logprobs, 1.3 * one.logprobs + 0.002) << tp;
    EXPECT_LE(off.other_tokens, 1.3 * one.other_tokens + 0.01) << tp;
    expect_equal(run(*runner, texts), first);
  }
}

// Experts over the ranks of lanes whose rows choose keys in some steps and see all in others: lanes
// replay short and long graphs beside one another, or have no rows.
TEST(GpuSparse, ExpertParallelLanesGiveTheBitsOfOneRank) {
  std::mt19937 random(10);
  const auto requests = requests_around_the_threshold(random);
  GpuRunnerOptions options = options_of({}, true);
  const auto alone = answers(*make_engine(options, {}, small_sparse_checkpoint()), requests, true);
  const auto over = [&](int tp, int dp) {
    GpuRunnerOptions its = ranks(tp, dp, options);
    its.placement.expert_parallel = true;
    return make_engine(its, {}, small_sparse_checkpoint());
  };
  for (const int dp : {2, 4}) {
    const auto engine = over(1, dp);
    expect_same_answers(answers(*engine, requests, true), alone);
    expect_same_answers(answers(*engine, requests, false), alone);
  }
  const auto lane = answers(*over(2, 1), requests, true);
  expect_same_answers(answers(*over(2, 2), requests, true), lane);
  options.graphs = false;
  expect_same_answers(answers(*over(1, 3), requests, true), alone);
}

// Pages carry the index keys: prefix hits, pages in host memory, preempted sequences and copies to
// another lane give the bits of a request alone.
TEST(GpuSparse, PrefixesOffloadAndLanesChangeNoBit) {
  std::mt19937 random(7);
  const auto requests = requests_around_the_threshold(random);
  const auto expected = answers(
      *make_engine(options_of({}, true), {.prefix_caching = false}, small_sparse_checkpoint()),
      requests, false);
  auto cached = make_engine(options_of({}, true), {}, small_sparse_checkpoint());
  expect_same_answers(answers(*cached, requests, true), expected);
  expect_same_answers(answers(*cached, requests, true), expected);
  EXPECT_GT(cached->stats().prefix_hits, 2000);
  for (const int lanes : {1, 2}) {
    expect_same_when_crowded(options_of({}, true), {}, lanes, requests, expected);
  }
}

// ---- a measurement: short prompts, adaptive against every row choosing

constexpr int kPrompts = 100;

std::unique_ptr<Engine> published_sizes(std::optional<int64_t> dense_keys) {
  const auto checkpoint = Checkpoint::open_dummy("bench/models/v3.2-4-layers");
  FATHOM_CHECK(checkpoint.has_value(), "{}", checkpoint.error().message);
  GpuRunnerOptions options = options_of(dense_keys, false);
  options.graphs = false;  // prompts have none
  options.max_batched_tokens = 8192;
  options.max_num_seqs = kPrompts;
  options.max_prompt_logit_rows = EngineOptions().max_prompt_logit_rows;
  options.max_total_tokens = kPrompts * 2048;
  const EngineOptions engine{.max_num_seqs = kPrompts,
                             .max_batched_tokens = 8192,
                             .max_queued_tokens = 1 << 24,
                             .prefix_caching = false};
  auto made = Engine::create(engine, on_gpu(options, *checkpoint), nullptr);
  FATHOM_CHECK(made.has_value(), "{}", made.error().message);
  return std::move(*made);
}

// Rates of requests of one token each that are submitted at once.
struct Served {
  double tokens_a_second, median_ttft_ms;
};
Served serve_prompts(Engine& engine, int64_t length) {
  using Clock = std::chrono::steady_clock;
  std::mt19937 random(5);
  std::vector<std::promise<Clock::time_point>> firsts(kPrompts);
  const auto begun = Clock::now();
  for (auto& first : firsts) {
    Request request;
    for (int64_t i = 0; i < length; ++i) {
      request.prompt_ids.push_back(static_cast<int32_t>(random() % 8000));
    }
    request.sampling = {.temperature = 0, .max_tokens = 1, .ignore_eos = true};
    const auto submitted = engine.submit(std::move(request), [&first](const Event& event) {
      if (event.last) first.set_value(Clock::now());
    });
    FATHOM_CHECK(submitted.has_value(), "{}", submitted.error().message);
  }
  std::vector<double> ms;
  for (auto& first : firsts) {
    ms.push_back(
        std::chrono::duration<double, std::milli>(first.get_future().get() - begun).count());
  }
  std::sort(ms.begin(), ms.end());
  return {static_cast<double>(kPrompts * length) / ms.back() * 1e3, ms[kPrompts / 2]};
}

TEST(GpuSparse, DISABLED_ShortPromptsASecond) {
  const auto adaptive = published_sizes({}), forced = published_sizes(0);
  for (const int64_t length : {512, 1024, 2000}) {
    for (int turn = 0; turn <= 5; ++turn) {
      const Served a = serve_prompts(*adaptive, length), f = serve_prompts(*forced, length);
      std::printf(
          "%ld tokens: adaptive %.0f tokens/s, TTFT %.1f ms; every row chooses %.0f, %.1f%s\n",
          static_cast<long>(length), a.tokens_a_second, a.median_ttft_ms, f.tokens_a_second,
          f.median_ttft_ms, turn == 0 ? ", the first" : "");
      std::fflush(stdout);
    }
  }
}

}  // namespace
}  // namespace fathom
