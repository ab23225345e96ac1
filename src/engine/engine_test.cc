// Random loads on the engine against the serial oracle: whatever is batched, cut, preempted, forked
// or aborted around it, every choice answers as if it were alone.
#include "engine/engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <future>
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
  double shared_share = 0.5;  // of prompts that begin as another does
  uint32_t seed = 1;
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
    // One of three beginnings, up to somewhere.
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
        // What came before the abort is a beginning of the whole answer.
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
  auto runner = std::make_unique<FakeRunner>(load.model);
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
    // Arrivals in bursts and in between; some aborts at once, others when the thing runs.
    if (random() % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
    if (std::uniform_real_distribution<>()(random) < load.abort_share) {
      Submitted& victim = all[random() % static_cast<size_t>(&submitted - all.data() + 1)];
      victim.aborted = true;
      engine.abort(victim.id);
      if (random() % 4 == 0) engine.abort(victim.id);
    }
  }
  EXPECT_TRUE(engine.drain(60s));
  const EngineStats stats = engine.stats();
  EXPECT_EQ(stats.pages_used, 0);
  EXPECT_EQ(stats.running + stats.waiting + stats.queued_requests + stats.queued_tokens, 0);
  engine.stop();
  check_answers(load, all);
  return stats;
}

// With the prefix cache and without it: the answers are the oracle's both times.
EngineStats run_load(Load load) {
  load.options.prefix_caching = false;
  const EngineStats without = run_once(load);
  EXPECT_EQ(without.pages_cached + without.prefix_hits + without.prefix_queries, 0);
  load.options.prefix_caching = true;
  return run_once(load);
}

// And over host memory and files below a small pool.
EngineStats run_offloaded(Load load) {
  const int64_t page_bytes = FakeRunner(FakeModel{}).page_transfer()->page_bytes();
  load.options.kv_offload_bytes = 5 * page_bytes;
  load.options.kv_offload_dir = testing::TempDir();
  load.options.kv_offload_disk_bytes = 200 * page_bytes;
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
    // 280 tokens are at most 5 pages: the largest request just fits into the smallest cache.
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
                                             .seed = seed});
    EXPECT_GT(stats.pages_stored, 5);
    returns += stats.prefix_returns;
  }
  EXPECT_GT(returns, 10) << "how many depends on how arrivals and steps fall together";
}

TEST(Engine, OffloadOptionsThatCannotBeAreRefused) {
  const auto refusal = [](EngineOptions options) {
    return Engine::create(options, std::make_unique<FakeRunner>(FakeModel{}), nullptr)
        .error()
        .message;
  };
  EXPECT_EQ(refusal({.prefix_caching = false, .kv_offload_bytes = 1 << 20}),
            "kv_offload_bytes and kv_offload_dir need prefix_caching, which is off");
  EXPECT_EQ(refusal({.kv_offload_bytes = -1}), "kv_offload_bytes is -1, must be 0 or more");
  EXPECT_EQ(refusal({.kv_offload_dir = "/no/such", .kv_offload_disk_bytes = 1 << 20}),
            "kv_offload_dir /no/such: No such file or directory");
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

// Stops the runner at a given step until the test lets it go on.
struct Gate {
  std::promise<void> reached, opened;
  std::future<void> open = opened.get_future();
  int64_t at_step = 1, steps = 0;

  Result<> pass() {
    if (++steps == at_step) {
      reached.set_value();
      open.wait();
    }
    return {};
  }
};

struct GatedEngine {
  explicit GatedEngine(int64_t at_step, EngineOptions options = {}, FakeModel model = {}) {
    gate.at_step = at_step;
    auto runner = std::make_unique<FakeRunner>(model);
    runner->before_step = [this](const ForwardBatch&) { return gate.pass(); };
    engine = std::move(*Engine::create(options, std::move(runner), tokenizer()));
  }
  void wait() { gate.reached.get_future().wait(); }
  void open() { gate.opened.set_value(); }

  Gate gate;
  std::unique_ptr<Engine> engine;
};

Request plain_request(int64_t prompt, int64_t max_tokens, int n = 1) {
  Request request;
  for (int64_t i = 0; i < prompt; ++i) request.prompt_ids.push_back(static_cast<int32_t>(i % 250));
  request.sampling.max_tokens = max_tokens;
  request.sampling.seed = 5;
  request.sampling.n = n;
  return request;
}

// Steps after the abort until the engine is idle; the events of each stage are counted.
void expect_one_abort(EventQueue& queue, int n) {
  int finals = 0;
  while (const auto event = queue.next()) {
    if (!event->finish) continue;
    EXPECT_EQ(event->finish, FinishReason::kAbort);
    EXPECT_FALSE(event->error.message.empty());
    ++finals;
    EXPECT_EQ(event->last, finals == n);
  }
  EXPECT_EQ(finals, n);
  EXPECT_TRUE(queue.ended());
  EXPECT_FALSE(queue.next()) << "nothing after the last";
}

TEST(EngineAbort, AtEachStage) {
  struct Stage {
    const char* name;
    int64_t at_step;
    int n;
  };
  // 100 tokens in chunks of 40: steps 1 to 3 are the prompt, then one token a step.
  for (const Stage& stage :
       {Stage{"first chunk", 1, 1}, Stage{"mid prompt", 2, 1}, Stage{"decode", 6, 1},
        Stage{"choices", 2, 3}, Stage{"choices decode", 9, 3}}) {
    SCOPED_TRACE(stage.name);
    GatedEngine gated(stage.at_step, {.max_num_seqs = 8, .max_batched_tokens = 40});
    EventQueue queue;
    const RequestId id = *gated.engine->submit(plain_request(100, 1000, stage.n), queue.sink());
    gated.wait();
    EXPECT_GT(gated.engine->stats().queued_requests + 1, 0);
    gated.engine->abort(id);
    gated.engine->abort(id);
    gated.open();
    expect_one_abort(queue, stage.n);
    gated.engine->abort(id);
    EXPECT_TRUE(gated.engine->drain(10s));
    EXPECT_EQ(gated.engine->stats().pages_used, 0);
    EXPECT_LE(gated.engine->stats().steps, stage.at_step) << "the step under way is the last";
  }
}

TEST(EngineAbort, WhileQueuedAndWhilePreempted) {
  GatedEngine gated(3, {.max_num_seqs = 2, .max_batched_tokens = 200, .preempt_every = 2},
                    {.num_pages = 40});
  EventQueue first, second, third;
  ASSERT_TRUE(gated.engine->submit(plain_request(10, 20), first.sink()));
  // Both of these are behind the gate's first step at the latest; the second is preempted in steps
  // 2 and 4, the third is queued.
  const RequestId second_id = *gated.engine->submit(plain_request(10, 1000), second.sink());
  const RequestId third_id = *gated.engine->submit(plain_request(10, 1000), third.sink());
  gated.wait();
  gated.engine->abort(third_id);
  gated.engine->abort(second_id);
  gated.open();
  expect_one_abort(second, 1);
  expect_one_abort(third, 1);
  std::optional<Event> last;
  while (auto event = first.next()) last = std::move(event);
  EXPECT_NE(last->finish, FinishReason::kAbort);
  EXPECT_TRUE(gated.engine->drain(10s));
  EXPECT_EQ(gated.engine->stats().pages_used, 0);
}

TEST(EngineAbort, FromTheSinkItself) {
  auto runner = std::make_unique<FakeRunner>(FakeModel{});
  auto engine = std::move(*Engine::create({}, std::move(runner), tokenizer()));
  std::promise<int> done;
  int events = 0;
  std::atomic<RequestId> id{0};
  id = *engine->submit(plain_request(10, 1000), [&](const Event& event) {
    if (++events == 4) engine->abort(event.request);
    if (event.last) done.set_value(events);
  });
  EXPECT_EQ(done.get_future().get(), 5);
}

TEST(Engine, QueueIsBounded) {
  GatedEngine gated(1, {.max_num_seqs = 1, .max_batched_tokens = 64, .max_queued_requests = 3});
  EventQueue running;
  ASSERT_TRUE(gated.engine->submit(plain_request(5, 5), running.sink()));
  gated.wait();
  std::vector<EventQueue> queued(3);
  for (EventQueue& queue : queued) {
    EXPECT_TRUE(gated.engine->has_room());
    ASSERT_TRUE(gated.engine->submit(plain_request(5, 5), queue.sink()));
  }
  const auto refused = gated.engine->submit(plain_request(5, 5), [](const Event&) { FAIL(); });
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Code::kResourceExhausted);
  EXPECT_NE(refused.error().message.find("at most 3"), std::string::npos)
      << refused.error().message;
  const auto room = gated.engine->has_room();
  ASSERT_FALSE(room);
  EXPECT_EQ(room.error().message, refused.error().message);
  EXPECT_EQ(gated.engine->stats().queued_requests, 3);
  EXPECT_EQ(gated.engine->stats().queued_tokens, 15);
  EXPECT_EQ(gated.engine->stats().rejected, 2);  // both were told so
  gated.open();
  EXPECT_TRUE(gated.engine->drain(10s));
  const auto late = gated.engine->submit(plain_request(5, 5), [](const Event&) { FAIL(); });
  ASSERT_FALSE(late);
  EXPECT_EQ(late.error().code, Code::kUnavailable);
  EXPECT_EQ(gated.engine->has_room().error().code, Code::kUnavailable);
}

TEST(Engine, StopEndsEveryRequest) {
  std::vector<EventQueue> queues(20);
  {
    GatedEngine gated(4, {.max_num_seqs = 4, .max_batched_tokens = 64});
    for (EventQueue& queue : queues) {
      ASSERT_TRUE(gated.engine->submit(plain_request(70, 1000, 2), queue.sink()));
    }
    gated.wait();
    std::thread stopper([&] { gated.engine->stop(); });
    gated.open();
    stopper.join();
  }
  for (EventQueue& queue : queues) expect_one_abort(queue, 2);
}

TEST(Engine, FailedStepEndsItsSequencesOnly) {
  auto runner = std::make_unique<FakeRunner>(FakeModel{});
  int64_t steps = 0;
  runner->before_step = [&steps](const ForwardBatch&) -> Result<> {
    if (++steps == 3) return error(Code::kInternal, "the device is on fire");
    return {};
  };
  auto engine = std::move(*Engine::create({}, std::move(runner), tokenizer()));
  EventQueue failing, next;
  ASSERT_TRUE(engine->submit(plain_request(10, 100, 2), failing.sink()));
  int finals = 0;
  while (const auto event = failing.next()) {
    if (!event->finish) continue;
    ++finals;
    EXPECT_EQ(event->finish, FinishReason::kError);
    EXPECT_EQ(event->error.message, "the device is on fire");
  }
  EXPECT_EQ(finals, 2);
  ASSERT_TRUE(engine->submit(plain_request(10, 4), next.sink()));
  std::optional<Event> last;
  while (auto event = next.next()) last = std::move(event);
  EXPECT_EQ(last->finish, FinishReason::kLength);
  EXPECT_EQ(engine->stats().failed, 2);
}

TEST(Engine, WithoutTokenizerThereAreOnlyIds) {
  auto engine = std::move(*Engine::create({}, std::make_unique<FakeRunner>(FakeModel{}), nullptr));
  EventQueue queue;
  ASSERT_TRUE(engine->submit(plain_request(10, 6), queue.sink()));
  size_t ids = 0;
  while (const auto event = queue.next()) {
    ids += event->ids.size();
    EXPECT_EQ(event->text, "");
  }
  EXPECT_EQ(ids, 6u);
}

TEST(Engine, SameSeedSameTokensAndNoSeedOthers) {
  auto engine =
      std::move(*Engine::create({}, std::make_unique<FakeRunner>(FakeModel{}), tokenizer()));
  const auto ids_of = [&](Request request) {
    EventQueue queue;
    EXPECT_TRUE(engine->submit(std::move(request), queue.sink()));
    std::vector<std::vector<int32_t>> ids(3);
    while (const auto event = queue.next()) {
      std::vector<int32_t>& mine = ids[static_cast<size_t>(event->index)];
      mine.insert(mine.end(), event->ids.begin(), event->ids.end());
    }
    return ids;
  };
  Request request = plain_request(10, 40, 3);
  const auto first = ids_of(request);
  for (int i = 0; i < 50; ++i) ASSERT_EQ(ids_of(request), first);
  EXPECT_NE(first[0], first[1]) << "choices have streams of their own";
  request.sampling.seed.reset();
  EXPECT_NE(ids_of(request), ids_of(request));
}

// The last event of a request that is run to its end.
Event run_to_end(Engine& engine, Request request) {
  EventQueue queue;
  const auto id = engine.submit(std::move(request), queue.sink());
  EXPECT_TRUE(id.has_value()) << id.error().message;
  Event last;
  std::vector<int32_t> ids;
  while (auto event = queue.next()) {
    ids.insert(ids.end(), event->ids.begin(), event->ids.end());
    last = std::move(*event);
  }
  last.ids = std::move(ids);
  return last;
}

TEST(EnginePrefix, ATurnOfAChatFindsTheOneBeforeAnswerAndAll) {
  auto engine = std::move(
      *Engine::create({}, std::make_unique<FakeRunner>(FakeModel{.num_pages = 40}), nullptr));
  Request request = plain_request(100, 200);
  const Event first = run_to_end(*engine, request);
  EXPECT_EQ(first.usage.cached_tokens, 0);
  request.prompt_ids.insert(request.prompt_ids.end(), first.ids.begin(), first.ids.end());
  request.prompt_ids.insert(request.prompt_ids.end(), {1, 2, 3});
  const Event second = run_to_end(*engine, request);
  EXPECT_EQ(second.usage.cached_tokens, 256) << "299 tokens were computed: four full pages";
  EXPECT_EQ(engine->stats().prefix_queries, 100 + 303);
  EXPECT_EQ(engine->stats().prefix_hits, 256);

  request.cache_salt = "another tenant";
  const Event salted = run_to_end(*engine, request);
  EXPECT_EQ(salted.usage.cached_tokens, 0);
  EXPECT_EQ(salted.ids, second.ids);
  EXPECT_EQ(run_to_end(*engine, request).usage.cached_tokens, 256);

  engine->flush_prefix_cache();
  EXPECT_EQ(run_to_end(*engine, request).usage.cached_tokens, 0);
  request.cache_salt.assign(257, 'x');
  const auto refused = engine->submit(request, [](const Event&) { FAIL(); });
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().message, "cache_salt has 257 bytes, at most 256 are allowed");
}

TEST(EnginePrefix, EqualPromptsThatArriveTogetherAreComputedOnce) {
  constexpr int64_t kPrompt = 1000;
  GatedEngine gated(1, {.max_num_seqs = 32, .max_batched_tokens = 64}, {.num_pages = 200});
  int64_t rows = 0;
  std::vector<EventQueue> queues(20);
  EventQueue blocker;
  ASSERT_TRUE(gated.engine->submit(plain_request(1, 1), blocker.sink()));
  gated.wait();
  for (EventQueue& queue : queues) {
    ASSERT_TRUE(gated.engine->submit(plain_request(kPrompt, 4), queue.sink()));
  }
  gated.open();
  for (EventQueue& queue : queues) {
    std::optional<Event> last;
    while (auto event = queue.next()) last = std::move(event);
    rows += kPrompt - last->usage.cached_tokens;
  }
  EXPECT_EQ(rows, kPrompt + 19 * (kPrompt - 960)) << "all but the last page are shared";
}

TEST(EnginePrefix, AbortOfTheOneThatComputesForOthers) {
  GatedEngine gated(3, {.max_num_seqs = 32, .max_batched_tokens = 64}, {.num_pages = 200});
  std::vector<EventQueue> queues(6);
  std::vector<RequestId> ids;
  for (EventQueue& queue : queues) {
    ids.push_back(*gated.engine->submit(plain_request(1000, 4), queue.sink()));
  }
  gated.wait();
  for (size_t i = 0; i < 3; ++i) gated.engine->abort(ids[i]);
  gated.open();
  for (size_t i = 0; i < queues.size(); ++i) {
    std::optional<Event> last;
    while (auto event = queues[i].next()) last = std::move(event);
    EXPECT_EQ(last->finish, i < 3 ? FinishReason::kAbort : FinishReason::kLength);
  }
  EXPECT_TRUE(gated.engine->drain(10s));
}

// A clock that the test sets; the engine reads it from its own thread.
struct ManualClock {
  std::chrono::steady_clock::time_point operator()() const {
    return std::chrono::steady_clock::time_point(seconds->load() * 1s);
  }
  std::shared_ptr<std::atomic<int64_t>> seconds = std::make_shared<std::atomic<int64_t>>(1000);
};

Event last_of(EventQueue& queue) {
  std::optional<Event> last;
  while (auto event = queue.next()) last = std::move(event);
  return std::move(*last);
}

TEST(EngineDeadlines, OfTheQueueAndOfTheWholeRequest) {
  const ManualClock clock;
  GatedEngine gated(2, {.max_num_seqs = 1, .max_batched_tokens = 64, .clock = clock});
  EventQueue running, queued;
  ASSERT_TRUE(gated.engine->submit(plain_request(5, 1000, 1), running.sink()));
  gated.wait();
  ASSERT_TRUE(gated.engine->submit(plain_request(5, 5), queued.sink()));
  *clock.seconds += 121;
  gated.open();
  const Event late = last_of(queued);
  EXPECT_EQ(late.finish, FinishReason::kAbort);
  EXPECT_EQ(late.error.code, Code::kDeadlineExceeded);
  EXPECT_EQ(
      late.error.message,
      "the request has not started 121.0 s after it was submitted, max_queue_time is 120.0 s");
  EXPECT_EQ(late.timings.queue_seconds(), 121);
  EXPECT_EQ(last_of(running).finish, FinishReason::kLength) << "it had started";
  EXPECT_EQ(gated.engine->stats().expired, 1);

  GatedEngine endless(4, {.max_total_time = 60s, .clock = clock});
  EventQueue queue, next;
  ASSERT_TRUE(endless.engine->submit(plain_request(5, 1000, 2), queue.sink()));
  endless.wait();
  ASSERT_TRUE(endless.engine->submit(plain_request(5, 5), next.sink()));
  *clock.seconds += 60;
  ASSERT_TRUE(endless.engine->submit(plain_request(5, 5), EventQueue().sink()));
  endless.open();
  const Event cut = last_of(queue);
  EXPECT_EQ(cut.finish, FinishReason::kAbort);
  EXPECT_EQ(cut.error.message,
            "the request has not ended 60.0 s after it was submitted, max_total_time is 60.0 s");
  EXPECT_EQ(last_of(next).finish, FinishReason::kAbort) << "queued as long";
  EXPECT_TRUE(endless.engine->drain(10s));
  EXPECT_EQ(endless.engine->stats().expired, 2);
  EXPECT_EQ(endless.engine->stats().length, 1);
}

TEST(EngineDeadlines, NoneMeansNever) {
  const ManualClock clock;
  GatedEngine gated(2, {.max_queue_time = 0s, .max_total_time = 0s, .clock = clock});
  EventQueue queue;
  ASSERT_TRUE(gated.engine->submit(plain_request(5, 5), queue.sink()));
  gated.wait();
  *clock.seconds += 1'000'000;
  gated.open();
  EXPECT_EQ(last_of(queue).finish, FinishReason::kLength);
}

TEST(Engine, MaxTokensNoneGoesToTheEndOfTheContext) {
  auto engine = std::move(*Engine::create(
      {}, std::make_unique<FakeRunner>(FakeModel{.max_model_len = 150, .num_pages = 2}), nullptr));
  EventQueue queue;
  Request request = plain_request(20, 1);
  request.sampling.max_tokens.reset();
  ASSERT_TRUE(engine->submit(request, queue.sink()));
  std::optional<Event> last;
  while (auto event = queue.next()) last = std::move(event);
  EXPECT_EQ(last->finish, FinishReason::kLength);
  EXPECT_EQ(last->usage.completion_tokens, 129 - 20) << "two pages and the token that needs none";
}

}  // namespace
}  // namespace fathom
