// Speculation over the bundled model changes no bit of an answer: requests of every kind with 0 to
// 3 drafts a step, on one rank, on several and on lanes, with prompts in chunks, preemption and
// shared prefixes too. Attention is absorbed throughout, in which a row's bits depend on its own
// keys only, so that what a chunk or a preemption computes again has the same bits.
#include <gtest/gtest.h>

#include <latch>

#include "base/json.h"
#include "base/random.h"
#include "e2e/golden.h"
#include "engine/engine.h"
#include "engine/model_runner.h"
#include "grammar/grammar_compiler.h"
#include "tokenizer/tokenizer.h"

namespace fathom {
namespace {

struct Choice {
  std::vector<int32_t> ids;
  std::string text;
  std::vector<float> logprobs;  // of the tokens, their alternatives and the prompt's
  std::optional<FinishReason> finish;
  bool operator==(const Choice&) const = default;

  void add(const TokenLogprob& token) {
    logprobs.push_back(token.logprob);
    for (const auto& [other, logprob] : token.top) logprobs.push_back(logprob);
  }
};
using Choices = std::vector<Choice>;

struct Shared {
  Checkpoint checkpoint = *Checkpoint::open(bundled_model());
  std::shared_ptr<const Tokenizer> tokenizer = std::move(*Tokenizer::load(bundled_model()));
  std::shared_ptr<const TokenGrammar> json, words;
  int32_t think_end = *tokenizer->token_id("</think>");
};

const Shared& shared() {
  static const Shared made = [] {
    Shared all;
    GrammarCompiler compiler(all.tokenizer, all.checkpoint.config().vocab_size,
                             GrammarCompilerOptions{.deadline = GrammarCompilerOptions::kPatient});
    all.words = *compiler.compile(
        {.kind = GrammarSpec::Kind::kRegex, .text = "[a-z]{3,9}( [a-z]{2,9}){2,6}\\."});
    all.json =
        *compiler.compile({.kind = GrammarSpec::Kind::kJsonSchema,
                           .text = R"({"type": "object", "properties": {"a": {"type": "integer"},
                     "b": {"type": "array", "items": {"type": "string"}}}, "required": ["a"]})"});
    return all;
  }();
  return made;
}

Request random_request(uint64_t number) {
  const Shared& with = shared();
  uint64_t draw = 0;
  const auto below = [&](uint64_t end) { return random_bits(7, number, draw++) % end; };
  Request request;
  const std::string questions[] = {
      fmt::format("Compute {} + {}.", below(900), below(900)),
      fmt::format("{}*{}", below(90), below(90)), "Tell me a short story.",
      fmt::format("Put these in order: {}, {}, {}", below(100), below(100), below(100)),
      fmt::format("Spell the word number {} backwards.", below(10))};
  const bool thinks = below(4) == 0;
  request.prompt_ids = with.tokenizer->encode(
      std::string("<｜begin▁of▁sentence｜>") + (below(3) == 0 ? "Answer as you always do." : "") +
      "<｜User｜>" + questions[below(5)] + "<｜Assistant｜>" + (thinks ? "<think>" : "</think>"));
  SamplingParams& sampling = request.sampling;
  sampling.seed = number;
  const double temperatures[] = {0, 0, 0.6, 1, 1.5};
  sampling.temperature = temperatures[below(5)];
  if (below(3) == 0) sampling.top_k = 1 + static_cast<int64_t>(below(40));
  if (below(3) == 0) sampling.top_p = 0.8;
  if (below(4) == 0) sampling.min_p = 0.05;
  if (below(4) == 0) sampling.repetition_penalty = 1.2;
  if (below(4) == 0) sampling.presence_penalty = 0.5;
  if (below(4) == 0) sampling.frequency_penalty = -0.3;
  if (below(5) == 0) sampling.logit_bias = {{100, 3.0f}, {1, -2.0f}};
  sampling.max_tokens = 1 + static_cast<int64_t>(below(40));
  if (below(4) == 0) {
    sampling.min_tokens = static_cast<int64_t>(below(static_cast<uint64_t>(*sampling.max_tokens)));
  }
  if (below(4) == 0) sampling.stop = {"1", " the", "s."};
  if (below(5) == 0) sampling.stop_token_ids = {20, 30, 40};
  sampling.ignore_eos = below(4) == 0;
  sampling.n = below(6) == 0 ? 3 : 1;
  sampling.logprobs = static_cast<int>(below(4)) - 1;
  if (below(6) == 0) sampling.prompt_logprobs = 1;
  if (below(5) == 0) request.grammar = below(2) == 0 ? with.words : with.json;
  if (request.grammar && thinks) request.grammar_begins_after = with.think_end;
  return request;
}

struct Cell {
  const char* name;
  Placement placement = {};
  DType compute = DType::kF32;
  CacheFormat cache = CacheFormat::kF32;
  bool is_crowded = false;  // small chunks, shared prefixes, preemption, a small cache
};

struct Outcome {
  Choices choices;
  SpeculationStats stats;
  int64_t steps = 0;
};

Outcome run(const Cell& cell, int64_t drafts, std::vector<Request> requests) {
  ModelRunnerOptions options;
  options.placement = cell.placement;
  options.compute = cell.compute;
  options.cache_format = cell.cache;
  options.attention.form = AttentionForm::kAbsorbed;
  options.max_batched_tokens = 512;
  options.max_total_tokens = cell.is_crowded ? 640 : 16384;
  options.num_threads = cell.placement.world();
  options.load.show_progress = false;
  options.max_drafts = drafts;
  auto runner = ModelRunner::create(shared().checkpoint, options);
  FATHOM_CHECK(runner.has_value(), "{}", runner.error().message);
  EngineOptions engine_options = {.max_num_seqs = 32, .max_batched_tokens = 512};
  engine_options.eos_ids = {*shared().tokenizer->eos_id()};
  if (cell.is_crowded) {
    engine_options.max_num_seqs = 6;
    engine_options.max_batched_tokens = 40;
    engine_options.preempt_every = 7;
  }
  auto engine = Engine::create(engine_options, std::move(*runner), shared().tokenizer);
  FATHOM_CHECK(engine.has_value(), "{}", engine.error().message);
  std::vector<Choices> of_requests(requests.size());
  std::latch ended(std::ssize(requests));
  for (size_t i = 0; i < requests.size(); ++i) {
    Request& request = requests[i];
    Choices& choices = of_requests[i];
    choices.resize(static_cast<size_t>(request.sampling.n));
    const auto id = (*engine)->submit(std::move(request), [&](const Event& event) {
      Choice& choice = choices[static_cast<size_t>(event.index)];
      choice.ids.insert(choice.ids.end(), event.ids.begin(), event.ids.end());
      choice.text += event.text;
      for (const auto& token : event.prompt_logprobs) {
        if (token) choice.add(*token);
      }
      for (const TokenLogprob& token : event.logprobs) choice.add(token);
      if (event.finish) choice.finish = event.finish;
      if (event.last) ended.count_down();
    });
    FATHOM_CHECK(id.has_value(), "{}", id.error().message);
  }
  ended.wait();
  Outcome outcome;
  const EngineStats stats = (*engine)->stats();
  outcome.stats = stats.speculation;
  outcome.steps = stats.steps;
  for (Choices& choices : of_requests) {
    outcome.choices.insert(outcome.choices.end(), choices.begin(), choices.end());
  }
  return outcome;
}

std::vector<Request> random_requests(uint64_t first, uint64_t count) {
  std::vector<Request> requests;
  for (uint64_t i = 0; i < count; ++i) requests.push_back(random_request(first + i));
  return requests;
}

void expect_equal_with_drafts(const Cell& cell, uint64_t first, uint64_t count) {
  const Outcome without = run(cell, 0, random_requests(first, count));
  EXPECT_EQ(without.stats.drafts, 0);
  for (int64_t drafts = 1; drafts <= kMaxDrafts; ++drafts) {
    const Outcome with = run(cell, drafts, random_requests(first, count));
    ASSERT_EQ(with.choices.size(), without.choices.size());
    for (size_t i = 0; i < with.choices.size(); ++i) {
      ASSERT_EQ(with.choices[i].ids, without.choices[i].ids) << "choice " << i;
      ASSERT_TRUE(with.choices[i] == without.choices[i]) << "choice " << i
                                                         << ": equal tokens, other "
                                                            "text, log-probabilities or finish";
    }
    EXPECT_GT(with.stats.accepted_tokens, with.stats.draft_tokens / 4);
    std::printf("%s, %lld drafts: %lld steps, %lld of %lld drafts accepted\n", cell.name,
                static_cast<long long>(drafts), static_cast<long long>(with.steps),
                static_cast<long long>(with.stats.accepted_tokens),
                static_cast<long long>(with.stats.draft_tokens));
  }
}

constexpr DType kBF16 = DType::kBF16;
const Cell kCells[] = {
    {.name = "float32"},
    {.name = "float32_crowded", .is_crowded = true},
    {.name = "bf16", .compute = kBF16, .cache = CacheFormat::kBF16},
    {.name = "bf16_fp8_cache_crowded",
     .compute = kBF16,
     .cache = CacheFormat::kFp8Scaled,
     .is_crowded = true},
    {.name = "tp2", .placement = {.tp = 2}},
    {.name = "dp2_crowded", .placement = {.dp = 2}, .is_crowded = true},
    {.name = "tp2_dp2_crowded", .placement = {.tp = 2, .dp = 2}, .is_crowded = true},
};

// The share of first drafts that are the token which is sampled, over completions of the evaluation
// sets' prose: drafter and sampler draw with the same noise.
double acceptance_at(double temperature) {
  constexpr int64_t kTexts = 60, kPrompt = 100, kTokens = 160;
  const auto text = read_text_file(goldens_directory() + "../data/eval/prose.txt", 1 << 24);
  FATHOM_CHECK(text.has_value(), "no prose");
  const std::vector<int32_t> prose = shared().tokenizer->encode(*text);
  std::vector<Request> requests(kTexts);
  for (int64_t i = 0; i < kTexts; ++i) {
    Request& request = requests[static_cast<size_t>(i)];
    const auto first = prose.begin() + i * (std::ssize(prose) - kPrompt) / kTexts;
    request.prompt_ids = {0};  // the beginning of a text
    request.prompt_ids.insert(request.prompt_ids.end(), first, first + kPrompt);
    request.sampling.temperature = temperature;
    request.sampling.seed = static_cast<uint64_t>(i);
    request.sampling.max_tokens = kTokens;
    request.sampling.ignore_eos = true;
  }
  const SpeculationStats stats =
      run({.name = "prose", .compute = DType::kBF16, .cache = CacheFormat::kBF16}, 1,
          std::move(requests))
          .stats;
  const double share =
      static_cast<double>(stats.accepted_tokens) / static_cast<double>(stats.drafts);
  std::printf("temperature %g: %lld of %lld first drafts accepted, %.3f\n", temperature,
              static_cast<long long>(stats.accepted_tokens), static_cast<long long>(stats.drafts),
              share);
  return share;
}

// Measured with another implementation of the model, over other texts and by the same rule: 0.516
// and 0.561; with a drafter that takes the largest logit 0.271 and 0.440, with noise of its own
// less than 0.3. Other choices of 40 and 60 texts give 0.510 to 0.539 at temperature 1.
TEST(SpeculationAcceptance, SampledDraftsShareTheSamplersNoise) {
  EXPECT_NEAR(acceptance_at(1.0), 0.516, 0.02);
  EXPECT_NEAR(acceptance_at(0.6), 0.561, 0.02);
}

class SpeculationCells : public testing::TestWithParam<Cell> {};

TEST_P(SpeculationCells, ChangesNoBitOfAnAnswer) { expect_equal_with_drafts(GetParam(), 0, 24); }

TEST_P(SpeculationCells, DISABLED_ChangesNoBitOf2000Answers) {
  for (uint64_t first = 1000; first < 3000; first += 100) {
    ASSERT_NO_FATAL_FAILURE(expect_equal_with_drafts(GetParam(), first, 100));
  }
}

INSTANTIATE_TEST_SUITE_P(Cells, SpeculationCells, testing::ValuesIn(kCells),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace fathom
