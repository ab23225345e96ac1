// Random loads on the engine, compared with the serial oracle: each choice's output equals what it
// would be alone, whatever is batched, chunked, preempted, forked or aborted around it.
#include "engine/engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <random>
#include <thread>

#include "engine/event_queue.h"
#include "engine/fake_runner.h"
#include "engine/serial_oracle.h"

namespace fathom {
namespace {

using namespace std::chrono_literals;

std::shared_ptr<const Tokenizer> tokenizer() {
  static const auto shared = fake_tokenizer();
  return shared;
}

struct Load {
  FakeModel model;
  EngineOptions options;
  int num_requests = 60;
  int max_prompt = 200, max_output = 80;
  double abort_share = 0;
  double shared_share = 0.5;  // of prompts that share a prefix with others
  int steps_in_flight = 1;
  // All requests wait before the second step: what is counted then depends on the load alone, not
  // on how arrivals and steps fall together.
  bool arrives_at_once = false;
  FakeCopies copies = {};
  uint32_t seed = 1;
};

// Holds the engine in its first step until the load has arrived.
class ArrivalGate {
 public:
  void pass() {
    reached_ = true;
    reached_.notify_all();
    arrived_.wait(false);
  }
  void wait_for_engine() { reached_.wait(false); }
  void open() {
    arrived_ = true;
    arrived_.notify_all();
  }

 private:
  std::atomic<bool> reached_ = false, arrived_ = false;
};

template <typename T>
T one_of(std::mt19937& random, std::initializer_list<T> values) {
  return values.begin()[random() % values.size()];
}

Request random_request(std::mt19937& random, const Load& load) {
  Request request;
  for (size_t i = 1 + random() % load.max_prompt; i > 0; --i) {
    request.prompt_ids.push_back(static_cast<int32_t>(random() % 290));
  }
  if (std::uniform_real_distribution<>()(random) < load.shared_share) {
    // A random part of one of three prefixes.
    const auto text = static_cast<int32_t>(random() % 3);
    const size_t shared = random() % (request.prompt_ids.size() + 1);
    for (size_t i = 0; i < shared; ++i) {
      request.prompt_ids[i] = (static_cast<int32_t>(i) * 7 + text) % 290;
    }
    if (random() % 4 == 0) request.cache_salt = "tenant";
  }
  request.priority = one_of(random, {0, 0, 0, -1, 2});
  SamplingParams& params = request.sampling;
  params.temperature = one_of(random, {0.0, 0.5, 1.0, 1.5});
  params.top_p = one_of(random, {1.0, 1.0, 0.8});
  params.top_k = one_of<int64_t>(random, {0, -1, 5, 50});
  params.min_p = one_of(random, {0.0, 0.0, 0.05});
  params.repetition_penalty = one_of(random, {1.0, 1.0, 1.2});
  params.presence_penalty = one_of(random, {0.0, 0.0, 0.5});
  params.frequency_penalty = one_of(random, {0.0, 0.0, -0.3});
  if (random() % 4 == 0) params.logit_bias = {{'a', 2.0f}, {kFakeEos, -3.0f}};
  params.seed = random();
  params.max_tokens = 1 + random() % load.max_output;
  if (random() % 3 == 0) params.min_tokens = static_cast<int64_t>(random() % *params.max_tokens);
  if (random() % 2 == 0) {
    params.stop = {"STOP", "abca"};
    if (random() % 2 == 0) params.stop = {"bcab", "\xC3\xA9", " a a", "TOP"};
  }
  if (random() % 3 == 0) params.stop_token_ids = {258};
  params.ignore_eos = random() % 2 == 0;
  params.include_stop_in_output = random() % 2 == 0;
  params.skip_special_tokens = random() % 2 == 0;
  params.n = one_of(random, {1, 1, 1, 2, 4});
  params.logprobs = one_of(random, {-1, -1, 0, 3});
  params.prompt_logprobs = one_of(random, {-1, -1, -1, 0, 2});
  return request;
}

struct Submitted {
  Request request;
  std::unique_ptr<AnswerCollector> collector;
  RequestId id = 0;
  bool aborted = false;
};

void check_answers(const Load& load, const std::vector<Submitted>& all) {
  for (size_t r = 0; r < all.size(); ++r) {
    const Submitted& submitted = all[r];
    EXPECT_TRUE(submitted.collector->last) << "request " << r;
    for (int index = 0; index < submitted.request.sampling.n; ++index) {
      const std::string what = fmt::format("request {} choice {}", r, index);
      const Answer& actual = submitted.collector->answers[static_cast<size_t>(index)];
      Answer expected = serial_answer(load.model, *tokenizer(), submitted.request, index);
      if (submitted.aborted && actual.finish == FinishReason::kAbort) {
        // The output before the abort is a prefix of the full output.
        ASSERT_LE(actual.ids.size(), expected.ids.size()) << what;
        expected.ids.resize(actual.ids.size());
        EXPECT_EQ(actual.ids, expected.ids) << what;
        EXPECT_EQ(expected.text.substr(0, actual.text.size()), actual.text) << what;
        continue;
      }
      expect_equal(actual, expected, what);
    }
  }
}

EngineStats run_once(Load load) {
  load.options.max_queued_tokens = 1 << 20;
  std::mt19937 random(load.seed);
  std::vector<Submitted> all(static_cast<size_t>(load.num_requests));
  ArrivalGate gate;  // outlives the engine
  auto runner = std::make_unique<FakeRunner>(load.model, load.steps_in_flight);
  runner->copies = load.copies;
  if (load.arrives_at_once) {
    runner->before_step = [&gate](const ForwardBatch&) {
      gate.pass();
      return Result<>();
    };
  }
  runner->max_rows = load.options.max_batched_tokens;
  runner->max_logit_rows = load.options.max_num_seqs + load.options.max_prompt_logit_rows;
  auto created = Engine::create(load.options, std::move(runner), tokenizer());
  EXPECT_TRUE(created.has_value()) << created.error().message;
  Engine& engine = **created;
  for (Submitted& submitted : all) {
    submitted.request = random_request(random, load);
    submitted.collector = std::make_unique<AnswerCollector>(submitted.request.sampling.n);
    AnswerCollector* collector = submitted.collector.get();
    const auto id = engine.submit(submitted.request,
                                  [collector](const Event& event) { collector->add(event); });
    EXPECT_TRUE(id.has_value()) << id.error().message;
    submitted.id = *id;
    // Requests arrive in bursts and singly. Some are aborted at once, others while they run.
    if (load.arrives_at_once) {
      gate.wait_for_engine();
    } else if (random() % 3 == 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
    }
    if (std::uniform_real_distribution<>()(random) < load.abort_share) {
      Submitted& victim = all[random() % static_cast<size_t>(&submitted - all.data() + 1)];
      victim.aborted = true;
      engine.abort(victim.id);
      if (random() % 4 == 0) engine.abort(victim.id);
    }
  }
  gate.open();
  EXPECT_TRUE(engine.drain(60s));
  EngineStats stats = engine.stats();
  EXPECT_EQ(stats.pages_used, 0);
  EXPECT_EQ(stats.running + stats.waiting + stats.queued_requests + stats.queued_tokens, 0);
  engine.stop();
  check_answers(load, all);
  return stats;
}

// With and without the prefix cache, with one step in flight and with two: the outputs always equal
// the oracle's.
EngineStats run_load(Load load) {
  load.options.prefix_caching = false;
  load.steps_in_flight = 2;
  const EngineStats without = run_once(load);
  EXPECT_EQ(without.pages_cached + without.prefix_hits + without.prefix_queries, 0);
  load.options.prefix_caching = true;
  run_once(load);
  load.steps_in_flight = 1;
  return run_once(load);
}

// The same with offload to host memory and files below a small pool.
EngineStats run_offloaded(Load load) {
  const int64_t page_bytes = FakeRunner(FakeModel{}).page_transfer(0)->page_bytes();
  load.options.kv_offload_bytes = 5 * page_bytes * load.model.num_lanes;
  load.options.kv_offload_dir = testing::TempDir();
  load.options.kv_offload_disk_bytes = 200 * page_bytes * load.model.num_lanes;
  return run_once(load);
}

TEST(Engine, RoomyCache) {
  const EngineStats stats =
      run_load({.model = {.num_pages = 2000}, .options = {.eos_ids = {kFakeEos}}});
  EXPECT_EQ(stats.preemptions, 0);
  EXPECT_GT(stats.prefix_hits, 500);
  EXPECT_GT(stats.pages_cached, 50) << "they stay for the next";
  EXPECT_EQ(stats.prefix_hits, stats.cached_tokens);
  EXPECT_EQ(stats.aborted + stats.failed, 0);
  EXPECT_GT(stats.stopped, 0);
  EXPECT_GT(stats.length, 0);
}

// Lanes with small pools: sequences are preempted, move, and take their pages with them.
TEST(Engine, SeveralLanes) {
  int64_t preemptions = 0, moved = 0, copied = 0;
  for (const int lanes : {2, 3, 8}) {
    Load load{.model = {.num_pages = 14, .num_lanes = lanes},
              .options = {.max_num_seqs = 6,
                          .max_batched_tokens = 70,
                          .eos_ids = {kFakeEos},
                          .preempt_every = 9},
              .num_requests = 100,
              .abort_share = 0.1,
              .seed = static_cast<uint32_t>(lanes)};
    run_load(load);
    load.arrives_at_once = true;
    const EngineStats stats = run_once(load);
    ASSERT_EQ(std::ssize(stats.lanes), lanes);
    preemptions += stats.preemptions;
    moved += stats.sequences_moved;
    copied += stats.pages_copied;
  }
  EXPECT_GT(preemptions, 100);
  EXPECT_GT(moved, 10);
  EXPECT_GT(copied, 10);
}

TEST(Engine, SeveralLanesOffload) {
  for (const bool late : {false, true}) {
    Load load{.model = {.num_pages = 14, .num_lanes = 8},
              .options = {.max_num_seqs = 6,
                          .max_batched_tokens = 70,
                          .eos_ids = {kFakeEos},
                          .preempt_every = 9},
              .num_requests = 100,
              .copies = {.late = late},
              .seed = 4};
    run_offloaded(load);
    load.arrives_at_once = true;
    const EngineStats stats = run_offloaded(load);
    EXPECT_GT(stats.prefix_returns, 0);
    EXPECT_GT(stats.pages_copied, 0);
  }
}

TEST(Engine, ChoicesSharePagesWithoutThePrefixCacheToo) {
  Load load{.model = {.num_pages = 2000}, .options = {.eos_ids = {kFakeEos}}};
  load.options.prefix_caching = false;
  EXPECT_GT(run_once(load).cached_tokens, 0);
}

TEST(Engine, EverySmallChunkSize) {
  for (const int64_t budget : {1, 2, 3, 7, 16, 63, 64, 65, 130}) {
    run_load({.model = {.num_pages = 40},
              .options = {.max_num_seqs = std::min<int64_t>(budget, 8),
                          .max_batched_tokens = budget,
                          .max_prompt_logit_rows = 1 + budget / 4,
                          .eos_ids = {kFakeEos}},
              .num_requests = 14,
              .max_prompt = 150,
              .max_output = 30,
              .seed = static_cast<uint32_t>(budget)});
  }
}

TEST(Engine, PagesRunOut) {
  int64_t preemptions = 0;
  for (uint32_t seed = 0; seed < 12; ++seed) {
    // 280 tokens take at most 5 pages: the largest request just fits into the smallest cache.
    preemptions += run_load({.model = {.num_pages = 5 + seed},
                             .options = {.max_num_seqs = 12,
                                         .max_batched_tokens = 12 + 20 * (seed % 4),
                                         .max_prompt_logit_rows = 5,
                                         .eos_ids = {kFakeEos}},
                             .num_requests = 30,
                             .seed = seed})
                       .preemptions;
  }
  EXPECT_GT(preemptions, 20) << "this test is about preemption";
}

TEST(Engine, PagesComeBackFromHostMemoryAndFiles) {
  int64_t returns = 0;
  for (uint32_t seed = 0; seed < 6; ++seed) {
    const EngineStats stats = run_offloaded({.model = {.num_pages = 5 + seed},
                                             .options = {.max_num_seqs = 12,
                                                         .max_batched_tokens = 60,
                                                         .max_prompt_logit_rows = 5,
                                                         .eos_ids = {kFakeEos},
                                                         .preempt_every = seed % 2 == 0 ? 0 : 5},
                                             .num_requests = 60,
                                             .abort_share = seed % 3 == 0 ? 0.2 : 0,
                                             .shared_share = 1,
                                             .steps_in_flight = 1 + static_cast<int>(seed) / 3,
                                             .seed = seed});
    EXPECT_GT(stats.pages_stored, 5);
    returns += stats.prefix_returns;
  }
  EXPECT_GT(returns, 10) << "how many depends on how arrivals and steps fall together";
}

Load small_cache(uint32_t seed) {
  return {.model = {.num_pages = 5 + seed},
          .options = {.max_num_seqs = 12,
                      .max_batched_tokens = 60,
                      .max_prompt_logit_rows = 5,
                      .eos_ids = {kFakeEos},
                      .preempt_every = seed % 2 == 0 ? 0 : 5},
          .num_requests = 60,
          .abort_share = seed % 3 == 0 ? 0.2 : 0,
          .shared_share = 1,
          .steps_in_flight = 1 + static_cast<int>(seed % 2),
          .seed = seed};
}

TEST(Engine, PagesThatComeBackLateAndOutOfOrder) {
  int64_t returns = 0;
  for (uint32_t seed = 0; seed < 8; ++seed) {
    Load load = small_cache(seed);
    load.copies.late = true;
    const EngineStats stats = run_offloaded(load);
    EXPECT_EQ(stats.failed, 0);
    returns += stats.prefix_returns;
  }
  EXPECT_GT(returns, 10) << "how many depends on how arrivals and steps fall together";
}

// A failed copy changes no output (run_once() compares them) and loses no page (the engine recounts
// them when it is idle).
TEST(Engine, EachCopyOfAPageMayFail) {
  std::atomic<int64_t> count = 0;
  for (const bool late : {false, true}) {
    Load load = small_cache(1);
    load.num_requests = 16;
    load.max_output = 30;
    load.copies.late = late;
    load.copies.count = &count;
    const int64_t before = count;
    run_offloaded(load);
    const int64_t most = count - before;
    for (int64_t n = 1; n <= most && !HasFailure(); ++n) {
      SCOPED_TRACE(testing::Message() << "copy " << n << " fails");
      load.copies.fail_at = n;
      EXPECT_EQ(run_offloaded(load).failed, 0);
    }
    load.copies.fail_at = 0;
    for (const int64_t every : {1, 2, 3, 10}) {
      load.copies.fail_every = every;
      EXPECT_EQ(run_offloaded(load).failed, 0) << every;
    }
  }
  EXPECT_GT(count, 20) << "how many depends on how arrivals and steps fall together";
}

TEST(Engine, OffloadOptionsThatCannotBeAreRefused) {
  const auto refusal = [](const EngineOptions& options) {
    return Engine::create(options, std::make_unique<FakeRunner>(FakeModel{}), nullptr)
        .error()
        .message;
  };
  EXPECT_EQ(refusal({.prefix_caching = false, .kv_offload_bytes = 1 << 20}),
            "kv_offload_bytes and kv_offload_dir need prefix_caching, which is off");
  EXPECT_EQ(refusal({.kv_offload_bytes = -1}), "kv_offload_bytes is -1, must be 0 or more");
  EXPECT_EQ(refusal({.kv_offload_dir = "/no/such", .kv_offload_disk_bytes = 1 << 20}),
            "kv_offload_dir /no/such: No such file or directory");
  FakeModel lanes;
  lanes.num_lanes = 2;
  const int64_t page_bytes = FakeRunner(lanes).page_transfer(0)->page_bytes();
  EXPECT_EQ(Engine::create({.kv_offload_bytes = 2 * page_bytes - 1},
                           std::make_unique<FakeRunner>(lanes), nullptr)
                .error()
                .message,
            fmt::format("kv_offload_bytes is {}, less than one page of {} bytes in each of 2 lanes",
                        2 * page_bytes - 1, page_bytes));
}

TEST(Engine, ForcedPreemptionChangesNothing) {
  for (const int64_t every : {1, 3, 7}) {
    const EngineStats stats = run_load({.model = {.num_pages = 100},
                                        .options = {.max_num_seqs = 8,
                                                    .max_batched_tokens = 100,
                                                    .eos_ids = {kFakeEos},
                                                    .preempt_every = every},
                                        .num_requests = 30,
                                        .seed = static_cast<uint32_t>(every)});
    EXPECT_GT(stats.preemptions, 10);
    EXPECT_LT(stats.pages_used + stats.pages_cached, stats.pages_total);
  }
}

TEST(Engine, AbortsAtRandomMoments) {
  int64_t aborted = 0;
  for (uint32_t seed = 0; seed < 25; ++seed) {
    aborted += run_load({.model = {.num_pages = 6 + seed},
                         .options = {.max_num_seqs = 6,
                                     .max_batched_tokens = 10 + 10 * (seed % 5),
                                     .max_prompt_logit_rows = 4,
                                     .eos_ids = {kFakeEos},
                                     .preempt_every = seed % 3 == 0 ? 5 : 0},
                         .num_requests = 40,
                         .abort_share = 0.5,
                         .seed = 100 + seed})
                   .aborted;
  }
  EXPECT_GT(aborted, 100);
}

}  // namespace
}  // namespace fathom
