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

EngineStats run_load(Load load) {
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

TEST(Engine, RoomyCache) {
  const EngineStats stats =
      run_load({.model = {.num_pages = 2000}, .options = {.eos_ids = {kFakeEos}}});
  EXPECT_EQ(stats.preemptions, 0);
  EXPECT_GT(stats.cached_tokens, 0) << "choices of a long prompt share its full pages";
  EXPECT_EQ(stats.aborted + stats.failed, 0);
  EXPECT_GT(stats.stopped, 0);
  EXPECT_GT(stats.length, 0);
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

TEST(Engine, ForcedPreemptionChangesNothing) {
  for (const int64_t every : {1, 3, 7}) {
    const EngineStats stats = run_load({.model = {.num_pages = 100},
                                        .options = {.max_num_seqs = 8,
                                                    .max_batched_tokens = 100,
                                                    .eos_ids = {kFakeEos},
                                                    .preempt_every = every},
                                        .num_requests = 16,
                                        .seed = static_cast<uint32_t>(every)});
    EXPECT_GT(stats.preemptions, 10);
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
    ASSERT_TRUE(gated.engine->submit(plain_request(5, 5), queue.sink()));
  }
  const auto refused = gated.engine->submit(plain_request(5, 5), [](const Event&) { FAIL(); });
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Code::kResourceExhausted);
  EXPECT_NE(refused.error().message.find("at most 3"), std::string::npos)
      << refused.error().message;
  EXPECT_EQ(gated.engine->stats().queued_requests, 3);
  EXPECT_EQ(gated.engine->stats().queued_tokens, 15);
  EXPECT_EQ(gated.engine->stats().rejected, 1);
  gated.open();
  EXPECT_TRUE(gated.engine->drain(10s));
  const auto late = gated.engine->submit(plain_request(5, 5), [](const Event&) { FAIL(); });
  ASSERT_FALSE(late);
  EXPECT_EQ(late.error().code, Code::kUnavailable);
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
