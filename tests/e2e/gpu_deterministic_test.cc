// GpuRunnerOptions::deterministic: a request's completion is bitwise identical alone and among any
// others. The bundled model on the GPU; the oracle of concurrent requests is the engine with one
// request at a time. Run from the repository's root.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <future>
#include <numeric>

#include "cache/latent_layout.h"
#include "e2e/gpu_fixture.h"

namespace fathom {
namespace {

// GEMMs: the checkpoint's FP8 in e4m3, or dequantized to bf16.
class GpuDeterministic : public testing::TestWithParam<StoredFp8> {
 protected:
  static GpuRunnerOptions deterministic_options() {
    GpuRunnerOptions options = gpu_options();
    options.max_num_seqs = 128;
    options.deterministic = true;
    options.expanded_keys = 1024;  // long prompts take several passes
    options.stored_fp8 = GetParam();
    return options;
  }
};

constexpr auto kProducts = {StoredFp8::kKept, StoredFp8::kExpandedToBF16};

std::string name_of_products(const testing::TestParamInfo<StoredFp8>& info) {
  return info.param == StoredFp8::kKept ? "E4m3" : "Bf16";
}

template <typename T>
T one_of(std::mt19937& random, std::initializer_list<T> values) {
  return values.begin()[random() % values.size()];
}

// Every option of the sampler; the draws depend on the last bit of a logit.
Request random_request(std::mt19937& random, int64_t most_tokens) {
  Request request;
  request.prompt_ids = random_prompt(random);
  // In random text every token is improbable.
  if (random() % 3 == 0) {
    for (int32_t& id : request.prompt_ids) id = static_cast<int32_t>(3 + random() % 8000);
  }
  SamplingParams& params = request.sampling;
  params.temperature = one_of(random, {0.0, 0.7, 1.0, 1.5});
  params.top_p = one_of(random, {1.0, 1.0, 0.9});
  params.top_k = one_of<int64_t>(random, {0, 0, 5, 50});
  params.min_p = one_of(random, {0.0, 0.0, 0.05});
  params.repetition_penalty = one_of(random, {1.0, 1.0, 1.2});
  params.presence_penalty = one_of(random, {0.0, 0.0, 0.5});
  params.frequency_penalty = one_of(random, {0.0, 0.0, -0.3});
  if (random() % 4 == 0) params.logit_bias = {{200, 2.0f}, {1, -3.0f}};
  if (random() % 5 == 0) params.stop = {"7", "the"};
  params.seed = random();
  params.max_tokens = 1 + static_cast<int64_t>(random()) % most_tokens;
  if (random() % 3 == 0) params.min_tokens = static_cast<int64_t>(random()) % *params.max_tokens;
  params.ignore_eos = random() % 2 == 0;
  params.n = one_of(random, {1, 1, 1, 1, 3});
  params.logprobs = one_of(random, {-1, 0, 5});
  params.prompt_logprobs = one_of(random, {-1, -1, -1, 2});
  return request;
}

std::vector<Request> random_requests(std::mt19937& random, int count, int64_t most_tokens) {
  std::vector<Request> requests;
  for (int i = 0; i < count; ++i) requests.push_back(random_request(random, most_tokens));
  return requests;
}

void expect_equal(const TokenLogprob& actual, const TokenLogprob& expected) {
  EXPECT_EQ(actual.id, expected.id);
  EXPECT_EQ(actual.logprob, expected.logprob);
  EXPECT_EQ(actual.top, expected.top);
}

void expect_equal(const Answer& actual, const Answer& expected) {
  ASSERT_EQ(actual.ids, expected.ids);
  EXPECT_EQ(actual.text, expected.text);
  EXPECT_EQ(actual.finish, expected.finish);
  ASSERT_EQ(actual.logprobs.size(), expected.logprobs.size());
  for (size_t i = 0; i < actual.logprobs.size(); ++i) {
    expect_equal(actual.logprobs[i], expected.logprobs[i]);
  }
  ASSERT_EQ(actual.prompt_logprobs.size(), expected.prompt_logprobs.size());
  for (size_t i = 0; i < actual.prompt_logprobs.size(); ++i) {
    ASSERT_EQ(actual.prompt_logprobs[i].has_value(), expected.prompt_logprobs[i].has_value());
    if (actual.prompt_logprobs[i]) {
      expect_equal(*actual.prompt_logprobs[i], *expected.prompt_logprobs[i]);
    }
  }
}

void expect_equal(const std::vector<Answer>& actual, const std::vector<Answer>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    SCOPED_TRACE(testing::Message() << "answer " << i);
    expect_equal(actual[i], expected[i]);
  }
}

TEST_P(GpuDeterministic, ARequestAmongOthersAnswersAsAlone) {
  std::mt19937 random(21);
  Request needle;
  needle.prompt_ids.resize(2500);  // cut by position; several launches
  for (int32_t& id : needle.prompt_ids) id = static_cast<int32_t>(3 + random() % 8000);
  needle.sampling = {
      .temperature = 1.2, .seed = 5, .max_tokens = 40, .ignore_eos = true, .logprobs = 20};
  const auto engine = make_engine(deterministic_options(), {.prefix_caching = false});
  const auto alone = answers(*engine, {needle}, true);
  ASSERT_EQ(alone[0].ids.size(), 40u);
  for (const int others : {1, 6, 63, 127}) {
    SCOPED_TRACE(testing::Message() << others << " others");
    auto requests = random_requests(random, others, 60);
    for (Request& request : requests) request.sampling.n = 1;
    const size_t at = random() % (requests.size() + 1);
    requests.insert(requests.begin() + static_cast<std::ptrdiff_t>(at), needle);
    expect_equal(answers(*engine, requests, true)[at], alone[0]);
  }
}

// A load on engines that use every feature of sequences and pages, against a plain one that runs
// one request after the other.
TEST_P(GpuDeterministic, RandomLoadsAnswerAsAlone) {
  std::mt19937 random(22);
  const auto requests = random_requests(random, 150, 60);
  const auto expected =
      answers(*make_engine(deterministic_options(), {.prefix_caching = false}), requests, false);
  {
    SCOPED_TRACE("all at once, prefixes shared");
    auto engine = make_engine(deterministic_options(), {});
    expect_equal(answers(*engine, requests, true), expected);
    expect_equal(answers(*engine, requests, true), expected);
    EXPECT_GT(engine->stats().prefix_hits, 1000);
  }
  {
    SCOPED_TRACE("few pages, preempted, pages in host memory, small chunks, no graphs");
    GpuRunnerOptions small = deterministic_options();
    small.max_total_tokens = 40 * kPageSize;
    small.max_batched_tokens = 150;
    small.graphs = false;
    auto engine = make_engine(small, {.kv_offload_bytes = 64 << 20, .preempt_every = 7});
    expect_equal(answers(*engine, requests, true), expected);
    EXPECT_GT(engine->stats().preemptions, 5);
    EXPECT_EQ(engine->stats().pages_used, 0);
  }
}

// With drafts a request's completion is what it is without, bit by bit.
TEST_P(GpuDeterministic, DraftsChangeNothing) {
  std::mt19937 random(27);
  const auto requests = random_requests(random, 100, 60);
  const auto expected =
      answers(*make_engine(deterministic_options(), {.prefix_caching = false}), requests, false);
  for (const int64_t drafts : {1, 2, 3}) {
    SCOPED_TRACE(testing::Message() << drafts << " drafts");
    GpuRunnerOptions options = deterministic_options();
    options.max_drafts = drafts;
    EngineOptions always{.max_drafts = drafts, .adapts_drafts = false};
    auto engine = make_engine(options, always);
    expect_equal(answers(*engine, requests, true), expected);
    expect_equal(answers(*engine, requests, true), expected);
    EXPECT_GT(engine->stats().speculation.accepted_tokens, 100);
    EXPECT_GT(engine->stats().prefix_hits, 1000);
    options.max_total_tokens = 40 * kPageSize;
    options.max_batched_tokens = 150;
    options.graphs = false;
    always.kv_offload_bytes = 64 << 20;
    always.preempt_every = 7;
    auto crowded = make_engine(options, always);
    expect_equal(answers(*crowded, requests, true), expected);
    EXPECT_GT(crowded->stats().preemptions, 5);
    EXPECT_EQ(crowded->stats().pages_used, 0);
  }
}

// Sequences computed step by step on a runner, with the log-probabilities of every position.
class Sequences {
 public:
  static constexpr int32_t kPages = 8;  // of one sequence
  using Top = std::vector<std::pair<int32_t, float>>;

  struct One {
    std::vector<int32_t> ids;
    int32_t prompt_len = 0;
    std::vector<int32_t> pages;
    int32_t computed = 0;
    std::vector<Top> tops;  // of each position

    int32_t left() const { return static_cast<int32_t>(ids.size()) - computed; }
  };

  // Runs one step: counts[i] more rows of sequence i.
  static void step(Runner& runner, std::vector<One>& all, const std::vector<int32_t>& counts) {
    ForwardBatch batch;
    batch.max_pages = kPages;
    batch.query_start = {0};
    const SampleOptions greedy{.temperature = 0};
    std::vector<SampleRow> rows;
    std::vector<Top*> tops;
    for (size_t s = 0; s < all.size(); ++s) {
      One& one = all[s];
      if (counts[s] == 0) continue;
      batch.context_lens.push_back(one.computed);
      batch.prompt_lens.push_back(one.prompt_len);
      batch.block_tables.insert(batch.block_tables.end(), one.pages.begin(), one.pages.end());
      one.tops.resize(one.ids.size());
      for (const int32_t end = one.computed + counts[s]; one.computed < end; ++one.computed) {
        const auto at = static_cast<size_t>(one.computed);
        batch.token_ids.push_back(one.ids[at]);
        batch.positions.push_back(one.computed);
        batch.logit_rows.push_back(static_cast<int32_t>(rows.size()));
        rows.push_back({.row = std::ssize(rows), .options = &greedy, .num_logprobs = 5});
        tops.push_back(&one.tops[at]);
      }
      batch.query_start.push_back(static_cast<int32_t>(batch.token_ids.size()));
    }
    if (rows.empty()) return;
    ASSERT_TRUE(runner.begin({&batch, 1}, rows).has_value());
    const auto tokens = runner.finish();
    ASSERT_TRUE(tokens.has_value()) << tokens.error().message;
    for (size_t i = 0; i < tops.size(); ++i) *tops[i] = (*tokens)[i].top;
  }
};

// However sequences are cut into chunks, after however many cached pages, and whoever takes part in
// a step: each position has the bits of a prompt in one chunk and an answer token by token.
TEST_P(GpuDeterministic, AnyChunksGiveTheSameBits) {
  std::mt19937 random(26);
  const auto below = [&](int32_t n) {
    return static_cast<int32_t>(random() % static_cast<uint32_t>(n));
  };
  GpuRunnerOptions options = deterministic_options();
  options.max_prompt_logit_rows = 2048;
  const auto runner = on_gpu(options);
  constexpr int32_t kSequences = 12;
  std::vector<Sequences::One> alone(kSequences);
  for (int32_t s = 0; s < kSequences; ++s) {
    Sequences::One& one = alone[static_cast<size_t>(s)];
    one.ids = random_prompt(random);
    while (std::ssize(one.ids) < 100 + 32 * s) one.ids.push_back(3 + below(8000));
    one.ids.resize(std::min<size_t>(one.ids.size(), Sequences::kPages * kPageSize));
    one.prompt_len = 1 + below(static_cast<int32_t>(one.ids.size()));
    for (int32_t page = 0; page < Sequences::kPages; ++page) {
      one.pages.push_back(s * Sequences::kPages + page);
    }
  }
  for (size_t s = 0; s < alone.size(); ++s) {
    std::vector<int32_t> counts(kSequences, 0);
    for (counts[s] = alone[s].prompt_len; alone[s].left() > 0; counts[s] = 1) {
      Sequences::step(*runner, alone, counts);
    }
  }
  for (int trial = 0; trial < 40 && !HasFailure(); ++trial) {
    std::vector<Sequences::One> all = alone;
    std::vector<int32_t> first(kSequences);
    for (int32_t s = 0; s < kSequences; ++s) {
      Sequences::One& one = all[static_cast<size_t>(s)];
      const int32_t cached =
          below(std::min(one.prompt_len, one.left() + one.computed - 1) / kPageSize + 1);
      first[static_cast<size_t>(s)] = one.computed = cached * kPageSize;
      for (int32_t page = cached; page < Sequences::kPages; ++page) {
        one.pages[static_cast<size_t>(page)] += kSequences * Sequences::kPages;
      }
      one.tops.clear();
    }
    const auto is_left = [](const Sequences::One& one) { return one.left() > 0; };
    while (std::any_of(all.begin(), all.end(), is_left)) {
      std::vector<int32_t> counts;
      for (const Sequences::One& one : all) {
        const int32_t to_page = kPageSize - one.computed % kPageSize;
        const int32_t wanted = one_of(random, {0, 0, 1, 1, to_page, to_page, 1 + below(200), 512});
        counts.push_back(std::min(one.left(), wanted));
      }
      Sequences::step(*runner, all, counts);
    }
    for (size_t s = 0; s < all.size(); ++s) {
      for (size_t i = static_cast<size_t>(first[s]); i < all[s].ids.size(); ++i) {
        ASSERT_EQ(all[s].tops[i], alone[s].tops[i])
            << "trial " << trial << ", sequence " << s << " with a prompt of " << all[s].prompt_len
            << " computed from " << first[s] << " on, position " << i;
      }
    }
  }
}

// Half of the requests are aborted; the others are unaffected.
TEST_P(GpuDeterministic, AbortsChangeNoOtherAnswer) {
  std::mt19937 random(23);
  auto kept = random_requests(random, 60, 60);
  const auto expected = answers(*make_engine(deterministic_options(), {}), kept, false);
  auto engine = make_engine(deterministic_options(), {});
  std::atomic<int> unfinished = 0;
  std::vector<RequestId> victims;
  for (Request& request : random_requests(random, 60, 60)) {
    ++unfinished;
    victims.push_back(*engine->submit(std::move(request), [&](const Event& event) {
      if (event.last) --unfinished;
    }));
    if (random() % 2 == 0) engine->abort(victims[random() % victims.size()]);
  }
  auto all = std::async(std::launch::async, [&] { return answers(*engine, kept, true); });
  for (const RequestId victim : victims) {
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
    engine->abort(victim);
  }
  expect_equal(all.get(), expected);
  EXPECT_TRUE(engine->drain(std::chrono::seconds(10)));
  EXPECT_EQ(unfinished.load(), 0);
  EXPECT_EQ(engine->stats().pages_used, 0);
}

INSTANTIATE_TEST_SUITE_P(Products, GpuDeterministic, testing::ValuesIn(kProducts),
                         name_of_products);

class GpuStep : public testing::TestWithParam<StoredFp8> {};

// Without the option the same batch is bitwise identical each time.
TEST_P(GpuStep, FiftyRunsOfABatchGiveTheSameBits) {
  std::mt19937 random(24);
  ForwardBatch batch;
  batch.max_pages = 8;
  batch.query_start = {0};
  std::vector<int32_t> free(40 * 8);
  std::iota(free.begin(), free.end(), 0);
  std::shuffle(free.begin(), free.end(), random);
  const SampleOptions greedy{.temperature = 0};
  std::vector<SampleRow> rows;
  for (int s = 0; s < 40; ++s) {
    const int32_t count = s % 2 == 0 ? 1 + s : 10 * s;
    for (int32_t i = 0; i < count; ++i) {
      batch.token_ids.push_back(static_cast<int32_t>(3 + random() % 8000));
      batch.positions.push_back(i);
    }
    batch.logit_rows.push_back(static_cast<int32_t>(batch.token_ids.size()) - 1);
    rows.push_back({.row = s, .options = &greedy, .num_logprobs = 20});
    batch.query_start.push_back(static_cast<int32_t>(batch.token_ids.size()));
    batch.context_lens.push_back(0);
    for (int p = 0; p < batch.max_pages; ++p) {
      batch.block_tables.push_back(free[static_cast<size_t>(s * batch.max_pages + p)]);
    }
  }
  GpuRunnerOptions options = gpu_options();
  options.max_batched_tokens = 8192;
  options.stored_fp8 = GetParam();
  const auto runner = on_gpu(options);
  ASSERT_LE(batch.num_rows(), options.max_batched_tokens);
  std::vector<SampledToken> first;
  for (int run = 0; run < 50; ++run) {
    ASSERT_TRUE(runner->begin({&batch, 1}, rows).has_value());
    const auto tokens = runner->finish();
    ASSERT_TRUE(tokens.has_value()) << tokens.error().message;
    if (run == 0) first.assign(tokens->begin(), tokens->end());
    for (size_t i = 0; i < first.size(); ++i) {
      ASSERT_EQ((*tokens)[i].id, first[i].id) << "run " << run;
      ASSERT_EQ((*tokens)[i].top, first[i].top) << "run " << run;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Products, GpuStep, testing::ValuesIn(kProducts), name_of_products);

}  // namespace
}  // namespace fathom
