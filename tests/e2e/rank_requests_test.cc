// Requests of every kind over placements: penalties, choices, log-probabilities of completions and
// prompts, a grammar, sampling. With whole prompts lanes of one rank give the bits of one rank,
// with and without expert parallelism, and lanes of several ranks those of a single lane. With
// chunked prompts, shared prefixes and preemption attention adds in another order: then tokens are
// equal and log-probabilities near, as those of tensor-parallel ranks are.
#include <gtest/gtest.h>

#include <cmath>
#include <latch>

#include "base/random.h"
#include "e2e/golden.h"
#include "engine/engine.h"
#include "engine/model_runner.h"
#include "grammar/grammar_compiler.h"
#include "tokenizer/tokenizer.h"

namespace fathom {
namespace {

constexpr int kRequests = 16;

struct Choice {
  std::vector<int32_t> ids;
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
  std::shared_ptr<const Tokenizer> tokenizer = std::move(*Tokenizer::load(bundled_model()));
  std::shared_ptr<const TokenGrammar> grammar;
};

const Shared& shared(int64_t vocab) {
  static const Shared made = [&] {
    Shared all;
    GrammarCompiler compiler(all.tokenizer, vocab,
                             GrammarCompilerOptions{.deadline = GrammarCompilerOptions::kPatient});
    all.grammar = *compiler.compile(
        {.kind = GrammarSpec::Kind::kRegex, .text = "[a-z]{3,9}( [a-z]{2,9}){2,6}\\."});
    return all;
  }();
  return made;
}

Request request_of(int number, int64_t vocab) {
  const Shared& with = shared(vocab);
  Request request;
  std::string text = number % 3 == 0 ? "Here is a list of numbers to begin with:" : "";
  for (int i = 0; i < 4 + 5 * (number % 7); ++i) {
    const auto stream = static_cast<uint64_t>(number % 3 == 0 ? 0 : number);
    text += fmt::format(" {}", random_bits(1, stream, static_cast<uint64_t>(i)) % 1000);
  }
  request.prompt_ids =
      with.tokenizer->encode("<｜begin▁of▁sentence｜><｜User｜>" + text +
                             fmt::format(" What is {} + 5?", number) + "<｜Assistant｜>");
  SamplingParams& sampling = request.sampling;
  sampling.seed = static_cast<uint64_t>(number);
  sampling.temperature = number % 2 == 0 ? 0 : 1;
  sampling.repetition_penalty = number % 4 == 1 ? 1.2 : 1;
  sampling.presence_penalty = number % 5 == 2 ? 0.5 : 0;
  sampling.frequency_penalty = number % 5 == 3 ? 0.3 : 0;
  sampling.max_tokens = 10 + number % 9;
  sampling.n = number % 5 == 4 ? 3 : 1;
  sampling.logprobs = 2;
  if (number % 8 == 6) sampling.prompt_logprobs = 1;
  if (number % 4 == 3) request.grammar = with.grammar;
  return request;
}

// What the engine does with prompts.
enum class Prompts { kWhole, kChunkedSharedAndPreempted };

struct Cell {
  Placement placement;
  DType compute = DType::kBF16;
  CacheFormat cache = CacheFormat::kBF16;
};

Choices run(const Cell& cell, Prompts prompts) {
  const auto checkpoint = Checkpoint::open(bundled_model());
  ModelRunnerOptions options;
  options.placement = cell.placement;
  options.compute = cell.compute;
  options.cache_format = cell.cache;
  options.max_batched_tokens = 4096;  // all prompts in one step
  options.max_total_tokens = 16384;   // and without a sequence that waits for pages
  options.num_threads = cell.placement.world();
  options.load.show_progress = false;
  auto runner = ModelRunner::create(*checkpoint, options);
  FATHOM_CHECK(runner.has_value(), "{}", runner.error().message);
  const int64_t vocab = (*runner)->vocab_size();
  EngineOptions engine_options = {.max_num_seqs = 32, .max_prompt_logit_rows = 2000};
  engine_options.max_batched_tokens = options.max_batched_tokens;
  engine_options.prefix_caching = false;
  engine_options.eos_ids = {*shared(vocab).tokenizer->eos_id()};
  if (prompts == Prompts::kChunkedSharedAndPreempted) {
    engine_options.max_num_seqs = 6;
    engine_options.max_batched_tokens = 48;
    engine_options.prefix_caching = true;
    engine_options.preempt_every = 9;
  }
  auto engine = Engine::create(engine_options, std::move(*runner), shared(vocab).tokenizer);
  FATHOM_CHECK(engine.has_value(), "{}", engine.error().message);
  // The engine waits in this request's last event until all others are there: steps do not depend
  // on when they come.
  std::latch waits(1), submitted(1);
  Request first;
  first.prompt_ids = {5};
  first.sampling.max_tokens = 1;
  const auto first_id = (*engine)->submit(first, [&](const Event& event) {
    if (!event.last) return;
    waits.count_down();
    submitted.wait();
  });
  FATHOM_CHECK(first_id.has_value(), "{}", first_id.error().message);
  waits.wait();
  std::vector<Choices> of_requests(kRequests);
  std::latch ended(kRequests);
  for (int i = 0; i < kRequests; ++i) {
    Request request = request_of(i, vocab);
    auto& choices = of_requests[static_cast<size_t>(i)];
    choices.resize(static_cast<size_t>(request.sampling.n));
    const auto id = (*engine)->submit(std::move(request), [&](const Event& event) {
      Choice& choice = choices[static_cast<size_t>(event.index)];
      choice.ids.insert(choice.ids.end(), event.ids.begin(), event.ids.end());
      for (const auto& token : event.prompt_logprobs) {
        if (token) choice.add(*token);
      }
      for (const TokenLogprob& token : event.logprobs) choice.add(token);
      if (event.finish) choice.finish = event.finish;
      if (event.last) ended.count_down();
    });
    FATHOM_CHECK(id.has_value(), "{}", id.error().message);
  }
  submitted.count_down();
  ended.wait();
  const EngineStats stats = (*engine)->stats();
  if (prompts == Prompts::kChunkedSharedAndPreempted) {
    EXPECT_GT(stats.preemptions, 0);
    EXPECT_GT(stats.prefix_hits, 0);
  }
  EXPECT_EQ(stats.failed + stats.aborted, 0);
  Choices all;
  for (Choices& choices : of_requests) all.insert(all.end(), choices.begin(), choices.end());
  return all;
}

// Equal tokens, and log-probabilities that are as near as logits of several ranks have to be.
void expect_near(const Choices& actual, const Choices& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(actual[i].ids, expected[i].ids) << "choice " << i;
    EXPECT_EQ(actual[i].finish, expected[i].finish) << "choice " << i;
    ASSERT_EQ(actual[i].logprobs.size(), expected[i].logprobs.size()) << "choice " << i;
    for (size_t k = 0; k < expected[i].logprobs.size(); ++k) {
      const float wanted = expected[i].logprobs[k];
      EXPECT_NEAR(actual[i].logprobs[k], wanted, (1 + std::abs(wanted)) / 128) << "choice " << i;
    }
  }
}

Placement lanes(int dp) { return {.dp = dp}; }
Placement experts(int dp) { return {.dp = dp, .expert_parallel = true}; }

void expect_one_ranks_bits(DType compute, CacheFormat cache, std::initializer_list<int> sizes) {
  const Choices expected = run({{}, compute, cache}, Prompts::kWhole);
  for (const int size : sizes) {
    SCOPED_TRACE(testing::Message() << size << " ranks");
    EXPECT_TRUE(run({lanes(size), compute, cache}, Prompts::kWhole) == expected);
    EXPECT_TRUE(run({experts(size), compute, cache}, Prompts::kWhole) == expected);
  }
}

void expect_single_lanes_bits(CacheFormat cache, std::initializer_list<int> tps) {
  const Choices one = run({{}, DType::kF32, cache}, Prompts::kWhole);
  for (const int tp : tps) {
    SCOPED_TRACE(testing::Message() << "tp " << tp);
    const Choices expected = run({{.tp = tp}, DType::kF32, cache}, Prompts::kWhole);
    EXPECT_TRUE(run({{.tp = tp, .dp = 2}, DType::kF32, cache}, Prompts::kWhole) == expected);
    if (cache == CacheFormat::kF32) expect_near(expected, one);
  }
}

void expect_equal_tokens_in_chunks(std::initializer_list<Placement> placements) {
  const Choices expected = run({{}, DType::kF32, CacheFormat::kF32}, Prompts::kWhole);
  for (const Placement& placement : placements) {
    SCOPED_TRACE(testing::Message() << "tp " << placement.tp << ", dp " << placement.dp << ", ep "
                                    << placement.expert_parallel);
    expect_near(
        run({placement, DType::kF32, CacheFormat::kF32}, Prompts::kChunkedSharedAndPreempted),
        expected);
  }
}

TEST(RankRequests, LanesHaveTheBitsOfOneRank) {
  expect_one_ranks_bits(DType::kBF16, CacheFormat::kBF16, {2});
}

TEST(RankRequests, LanesOfSeveralRanksHaveTheBitsOfASingleLane) {
  expect_single_lanes_bits(CacheFormat::kF32, {2});
}

TEST(RankRequests, ChunksPrefixesAndPreemptionChangeNoToken) {
  expect_equal_tokens_in_chunks({{}, {.tp = 2}, {.dp = 2, .expert_parallel = true}});
}

// With the label slow.
TEST(RankRequests, DISABLED_AllSizes) {
  expect_one_ranks_bits(DType::kBF16, CacheFormat::kBF16, {3, 4, 8});
  expect_one_ranks_bits(DType::kBF16, CacheFormat::kFp8Scaled, {2, 4, 8});
  expect_single_lanes_bits(CacheFormat::kBF16, {2, 3, 4});
  expect_single_lanes_bits(CacheFormat::kFp8Scaled, {2, 3, 4});
  expect_single_lanes_bits(CacheFormat::kF32, {3, 4});
  expect_equal_tokens_in_chunks({{.tp = 3},
                                 {.tp = 4},
                                 {.dp = 2},
                                 {.dp = 4},
                                 {.dp = 8},
                                 {.tp = 2, .dp = 2},
                                 {.tp = 2, .dp = 2, .expert_parallel = true},
                                 {.dp = 4, .expert_parallel = true},
                                 {.dp = 8, .expert_parallel = true}});
}

}  // namespace
}  // namespace fathom
