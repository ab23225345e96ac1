// The MTP layer of the bundled model on the GPU: its logits against float32 on the CPU, beside the
// main model's, after every kind of step, and drafts through the engine. Run from the repository's
// root.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>

#include "cache/latent_layout.h"
#include "chat/format.h"
#include "chat/prompt_ids.h"
#include "e2e/forced_answers.h"
#include "e2e/gpu_deviation.h"
#include "e2e/gpu_fixture.h"
#include "e2e/gpu_mtp_trial.h"
#include "e2e/gpu_sparse_requests.h"
#include "engine/model_runner.h"

namespace fathom {
namespace {

[[maybe_unused]] const bool kExpectsRanks = (expect_gpu_ranks(), true);

struct Form {
  StoredFp8 stored = StoredFp8::kKept;
  CacheFormat format = CacheFormat::kBF16;
};

class GpuMtp : public testing::TestWithParam<Form> {};

// Main logits and drafts alike: bounds as GpuRunner.IsNearToFloat32 has them for the main model's.
TEST_P(GpuMtp, LogitsAreNearToFloat32) {
  const auto [stored, format] = GetParam();
  const Checkpoint& checkpoint = bundled_checkpoint();
  const int64_t vocab = checkpoint.config().vocab_size;
  std::mt19937 random(7);
  std::vector<std::vector<int32_t>> texts;
  for (size_t t = 0; t < 6; ++t) {
    std::vector<int32_t> ids;
    while (std::ssize(ids) < kMtpTextTokens) {
      const auto prompt = random_prompt(random);
      ids.insert(ids.end(), prompt.begin(), prompt.end());
    }
    ids.resize(kMtpTextTokens);
    texts.push_back(std::move(ids));
  }
  const auto right_model = mtp_on_cpu(checkpoint, DType::kF32, CacheFormat::kF32),
             near_model = mtp_on_cpu(checkpoint, DType::kBF16, format),
             gpu_model = mtp_on_gpu(checkpoint, stored, format);
  const MtpTrace right = run_mtp(*right_model, texts, vocab),
                 near = run_mtp(*near_model, texts, vocab), gpu = run_mtp(*gpu_model, texts, vocab);
  const bool is_bf16 = stored == StoredFp8::kExpandedToBF16;
  const auto compare = [&](const auto& field, const char* what) {
    const Deviation cpu = deviation(near.*field, right.*field, what),
                    its = deviation(gpu.*field, right.*field, what);
    EXPECT_LE(its.logprobs, is_bf16 ? 1.8 * cpu.logprobs : 0.32) << what;
    EXPECT_LE(its.other_tokens, is_bf16 ? 1.8 * cpu.other_tokens + 0.02 : 0.22) << what;
  };
  compare(&MtpTrace::main, "main logits");
  compare(&MtpTrace::first_drafts, "first drafts");
  compare(&MtpTrace::later_drafts, "later drafts");
}

INSTANTIATE_TEST_SUITE_P(Forms, GpuMtp,
                         testing::Values(Form{StoredFp8::kExpandedToBF16, CacheFormat::kBF16},
                                         Form{StoredFp8::kKept, CacheFormat::kBF16},
                                         Form{StoredFp8::kExpandedToBF16, CacheFormat::kFp8Scaled},
                                         Form{StoredFp8::kKept, CacheFormat::kE4M3}));

GpuRunnerOptions drafting(int64_t drafts) {
  GpuRunnerOptions options = gpu_options();
  options.max_drafts = drafts;
  return options;
}

EngineOptions always(int64_t drafts, EngineOptions options = {}) {
  options.max_drafts = drafts;
  options.adapts_drafts = false;
  return options;
}

// The share of right drafts in an engine's windows of one draft.
double acceptance(const Engine& engine) {
  const SpeculationStats stats = engine.stats().speculation;
  EXPECT_GT(stats.drafts, 200);
  return static_cast<double>(stats.accepted_tokens) / static_cast<double>(stats.drafts);
}

// Sums, with what docs/speculation.md has for such on the CPU, 0.993, and as the CPU has these.
TEST(GpuDrafts, FirstDraftsOfSumsAreAsRightAsOnTheCpu) {
  std::mt19937 random(31);
  std::vector<Request> requests;
  for (int i = 0; i < 100; ++i) {
    Conversation conversation;
    conversation.messages.push_back(plain_message(
        Role::kUser, fmt::format("Compute {} + {}.", random() % 1000, random() % 1000)));
    const auto prompt = render(ChatFormat::kV3, conversation);
    ASSERT_TRUE(prompt.has_value());
    Request request;
    request.prompt_ids = encode_prompt(*bundled_tokenizer(), *prompt);
    request.sampling.temperature = 0;
    request.sampling.max_tokens = 40;
    requests.push_back(std::move(request));
  }
  auto on_device = make_engine(drafting(1), always(1));
  answers(*on_device, requests, true);
  ModelRunnerOptions cpu;
  cpu.max_total_tokens = kGpuTestTokens;
  cpu.load.show_progress = false;
  cpu.max_drafts = 1;
  auto runner = ModelRunner::create(bundled_checkpoint(), cpu);
  ASSERT_TRUE(runner.has_value()) << runner.error().message;
  EngineOptions engine = always(1);
  engine.max_num_seqs = 64;
  engine.max_queued_tokens = 1 << 24;
  engine.eos_ids = {1};
  auto on_host = Engine::create(engine, std::move(*runner), bundled_tokenizer());
  ASSERT_TRUE(on_host.has_value()) << on_host.error().message;
  answers(**on_host, requests, true);
  const double gpu = acceptance(*on_device), host = acceptance(**on_host);
  std::printf("first drafts accepted: %.4f, on the CPU %.4f\n", gpu, host);
  EXPECT_GE(gpu, 0.97);
  EXPECT_NEAR(gpu, host, 0.015);
}

// Each row of a window against float32, as without drafts; with preemption, chunks, prefixes and
// pages in host memory, which carry the layer's rows and states: acceptance does not fall.
TEST(GpuDrafts, EveryRowIsAsFloat32HasIt) {
  std::mt19937 random(32);
  const auto requests = random_requests(random, 60);
  // As GpuEngineProducts has them in e4m3.
  const ForcedLimits limits{.row = 4.5, .mean = 0.12};
  const auto share = [](const Engine& engine) {
    const SpeculationStats stats = engine.stats().speculation;
    return static_cast<double>(stats.accepted_per_pos[0]) / static_cast<double>(stats.drafts);
  };
  auto plain = make_engine(drafting(3), always(3));
  expect_as_forced(requests, answers(*plain, requests, true), limits);
  GpuRunnerOptions small = drafting(3);
  small.max_total_tokens = 40 * kPageSize;
  small.max_batched_tokens = 150;
  auto crowded = make_engine(small, always(3, {.kv_offload_bytes = 64 << 20, .preempt_every = 7}));
  for (int time = 0; time < 2; ++time) {
    expect_as_forced(requests, answers(*crowded, requests, true), limits);
  }
  EXPECT_GT(crowded->stats().preemptions, 5);
  EXPECT_GT(crowded->stats().prefix_hits, 0);
  EXPECT_EQ(crowded->stats().pages_used, 0);
  std::printf("first drafts accepted: %.4f, %.4f with few pages\n", share(*plain), share(*crowded));
  EXPECT_GE(share(*crowded), share(*plain) - 0.02);
}

// Drafts that adapt, in two lanes on one device.
TEST(GpuDrafts, LanesAndPolicy) {
  std::mt19937 random(33);
  const auto requests = random_requests(random, 80);
  GpuRunnerOptions options = ranks(1, 2, drafting(3));
  auto engine = make_engine(options, {.max_drafts = 3, .adapts_drafts = true});
  expect_as_forced(requests, answers(*engine, requests, true), {.row = 4.5, .mean = 0.12});
  EXPECT_EQ(engine->stats().pages_used, 0);
}

// A rank that waits for another one says so after a minute.
GpuRunnerOptions drafting_ranks(int tp, int dp, GpuRunnerOptions options) {
  options.step_timeout = std::chrono::minutes(2);
  return ranks(tp, dp, std::move(options));
}

// Ranks of a lane draft together: the sums of the layer's blocks are the lane's, and states and
// cache rows are on every rank.
TEST(GpuDrafts, RanksOfALane) {
  std::mt19937 random(34);
  const auto requests = random_requests(random, 60);
  const auto share = [](const Engine& engine) {
    const SpeculationStats stats = engine.stats().speculation;
    return static_cast<double>(stats.accepted_per_pos[0]) / static_cast<double>(stats.drafts);
  };
  auto alone = make_engine(drafting(3), always(3));
  answers(*alone, requests, true);
  for (const int tp : {2, 4}) {
    SCOPED_TRACE(testing::Message() << tp << " ranks");
    auto engine = make_engine(drafting_ranks(tp, 1, drafting(3)), always(3));
    expect_as_forced(requests, answers(*engine, requests, true), {.row = 4.5, .mean = 0.12});
    std::printf("first drafts accepted: %.4f, on one rank %.4f\n", share(*engine), share(*alone));
    std::fflush(stdout);
    EXPECT_GE(share(*engine), share(*alone) - 0.03);  // texts differ where rounding does
  }
  // To the bit where bits do not depend on the batch; two lanes of two ranks with few pages.
  GpuRunnerOptions options = drafting(0);
  options.deterministic = true;
  const auto expected = answers(
      *make_engine(drafting_ranks(2, 1, options), {.prefix_caching = false}), requests, false);
  for (const int dp : {1, 2}) {
    SCOPED_TRACE(testing::Message() << dp << " lanes");
    options.max_drafts = 3;
    options.max_total_tokens = 40 * kPageSize;
    options.max_batched_tokens = dp == 1 ? 512 : 150;  // steps of many rows divide their sums
    auto engine = make_engine(drafting_ranks(2, dp, options),
                              always(3, {.kv_offload_bytes = 64 << 20, .preempt_every = 7}));
    expect_same_answers(answers(*engine, requests, true), expected);
    expect_same_answers(answers(*engine, requests, true), expected);
    EXPECT_GT(engine->stats().speculation.accepted_tokens, 100);
    EXPECT_EQ(engine->stats().pages_used, 0);
  }
}

// Experts of all lanes' ranks, the MTP layer's too: lanes draft beside lanes that do not, or that
// have no rows.
TEST(GpuDrafts, ExpertsOverRanks) {
  std::mt19937 random(35);
  const auto requests = random_requests(random, 60);
  const auto over = [](int tp, int dp, const GpuRunnerOptions& options, EngineOptions engine) {
    GpuRunnerOptions its = drafting_ranks(tp, dp, options);
    its.placement.expert_parallel = true;
    return make_engine(its, std::move(engine));
  };
  GpuRunnerOptions options = drafting(0);
  options.deterministic = true;
  const EngineOptions plain{.prefix_caching = false};
  const auto of_one_rank = answers(*make_engine(options, plain), requests, false);
  const auto of_two_ranks = answers(*over(2, 1, options, plain), requests, false);
  options.max_drafts = 3;
  auto alone = make_engine(options, always(3));
  expect_same_answers(answers(*alone, requests, true), of_one_rank);
  struct Case {
    int tp, dp;
    bool graphs, crowded;
  };
  for (const Case& c : {Case{1, 2, true, false}, Case{1, 4, true, true}, Case{1, 3, false, false},
                        Case{2, 1, true, false}, Case{2, 2, true, true}}) {
    SCOPED_TRACE(testing::Message() << "--tp " << c.tp << " --dp " << c.dp);
    GpuRunnerOptions its = options;
    its.graphs = c.graphs;
    EngineOptions engine = always(3);
    if (c.crowded) {
      its.max_total_tokens = 40 * kPageSize;
      its.max_batched_tokens = 150;
      engine = always(3, {.kv_offload_bytes = 64 << 20, .preempt_every = 7});
    }
    const auto drafter = over(c.tp, c.dp, its, engine);
    const auto& expected = c.tp == 1 ? of_one_rank : of_two_ranks;
    expect_same_answers(answers(*drafter, requests, true), expected);
    if (!c.crowded) expect_same_answers(answers(*drafter, requests, false), expected);
    const SpeculationStats stats = drafter->stats().speculation;
    EXPECT_GT(stats.accepted_tokens, 100);
    EXPECT_EQ(drafter->stats().pages_used, 0);
    // Answers do not depend on drafts: that these are the model's, their share of right ones tells.
    const SpeculationStats right = alone->stats().speculation;
    const auto first = [](const SpeculationStats& of) {
      return static_cast<double>(of.accepted_per_pos[0]) / static_cast<double>(of.drafts);
    };
    std::printf("first drafts accepted: %.4f, on one rank %.4f\n", first(stats), first(right));
    std::fflush(stdout);
    EXPECT_GE(first(stats), first(right) - 0.03);
  }
}

// ---- measurements: V2-Lite's shape with random weights, requests behind prompts of 1,024 tokens

const Checkpoint& lite_checkpoint() {
  static const Checkpoint opened = [] {
    auto result = Checkpoint::open_dummy("bench/models/v2-lite-mtp");
    FATHOM_CHECK(result.has_value(), "{}", result.error().message);
    return std::move(*result);
  }();
  return opened;
}

std::unique_ptr<Engine> lite_engine(int64_t drafts, bool adapts, int64_t sequences) {
  GpuRunnerOptions options = drafting(drafts);
  options.max_batched_tokens = 4096;
  options.max_prompt_logit_rows = EngineOptions().max_prompt_logit_rows;
  options.max_num_seqs = sequences;
  options.max_total_tokens = sequences * 1792;
  EngineOptions engine{.max_num_seqs = sequences,
                       .max_batched_tokens = 4096,
                       .max_queued_tokens = 1 << 24,
                       .prefix_caching = false,
                       .max_drafts = drafts,
                       .adapts_drafts = adapts};
  auto made = Engine::create(engine, on_gpu(options, lite_checkpoint()), nullptr);
  FATHOM_CHECK(made.has_value(), "{}", made.error().message);
  return std::move(*made);
}

// Tokens a second of `batch` requests at once, each of so many tokens behind its first 16.
double tokens_a_second(Engine& engine, int batch, int64_t tokens, float temperature) {
  const auto seconds = [&](int64_t count) {
    std::mt19937 random(5);
    std::vector<Request> requests;
    for (int i = 0; i < batch; ++i) {
      Request request;
      for (int token = 0; token < 1024; ++token) {
        request.prompt_ids.push_back(static_cast<int32_t>(random() % 100000));
      }
      request.sampling.temperature = temperature;
      request.sampling.seed = random();
      request.sampling.max_tokens = count;
      request.sampling.ignore_eos = true;
      requests.push_back(std::move(request));
    }
    const auto begun = std::chrono::steady_clock::now();
    answers(engine, requests, true);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
  };
  const double short_s = seconds(16);
  return static_cast<double>(batch * tokens) / (seconds(16 + tokens) - short_s);
}

// Without drafts, adapting and always.
TEST(GpuDrafts, DISABLED_TokensASecond) {
  struct Way {
    const char* name;
    int64_t drafts;
    bool adapts;
  };
  for (const Way& way :
       {Way{"without", 0, true}, Way{"up to 3", 3, true}, Way{"always 1", 1, false},
        Way{"without", 0, true}, Way{"up to 3", 3, true}}) {
    const auto engine = lite_engine(way.drafts, way.adapts, 64);
    for (const int batch : {1, 16, 64}) {
      tokens_a_second(*engine, batch, 48, 1);
      const double rate = tokens_a_second(*engine, batch, 256, 1);
      const SpeculationStats stats = engine->stats().speculation;
      std::printf("%s, %d sequences: %.1f tokens/s; %ld windows so far, %ld drafts accepted\n",
                  way.name, batch, rate, static_cast<long>(stats.drafts),
                  static_cast<long>(stats.accepted_tokens));
      std::fflush(stdout);
    }
  }
}

// Greedy, where random weights accept no draft: what adapting costs, in turns with an engine
// without the layer.
TEST(GpuDrafts, DISABLED_CostOfAdapting) {
  const auto plain = lite_engine(0, false, 16), adapting = lite_engine(3, true, 16);
  for (const int batch : {1, 4, 16}) {
    std::vector<double> ratios;
    for (int turn = 0; turn <= 5; ++turn) {
      const double without = tokens_a_second(*plain, batch, 512, 0);
      const SpeculationStats before = adapting->stats().speculation;
      const double with = tokens_a_second(*adapting, batch, 512, 0);
      const SpeculationStats stats = adapting->stats().speculation;
      std::printf(
          "%d sequences: %.1f and %.1f tokens/s (%.4f); %ld windows, %ld drafts accepted%s\n",
          batch, without, with, with / without, static_cast<long>(stats.drafts - before.drafts),
          static_cast<long>(stats.accepted_tokens - before.accepted_tokens),
          turn == 0 ? ", the first" : "");
      std::fflush(stdout);
      if (turn > 0) ratios.push_back(with / without);
    }
    std::ranges::sort(ratios);
    std::printf("%d sequences: median %.4f, %.4f to %.4f\n", batch, ratios[ratios.size() / 2],
                ratios.front(), ratios.back());
    EXPECT_GE(ratios[ratios.size() / 2], 0.98);
  }
}

}  // namespace
}  // namespace fathom
