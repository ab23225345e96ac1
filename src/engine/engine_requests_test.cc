// Single requests on the engine: aborts at each stage, a full queue, failing steps, shared
// prefixes, deadlines.
#include <gtest/gtest.h>

#include <algorithm>
#include <future>
#include <limits>
#include <random>
#include <thread>

#include "engine/engine.h"
#include "engine/event_queue.h"
#include "engine/fake_runner.h"
#include "engine/fake_tokenizer.h"

namespace fathom {
namespace {

using namespace std::chrono_literals;

// Stops the runner at a given step until the test opens the gate.
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
  explicit GatedEngine(int64_t at_step, EngineOptions options = {}, FakeModel model = {},
                       int steps_in_flight = 1) {
    gate.at_step = at_step;
    auto runner = std::make_unique<FakeRunner>(model, steps_in_flight);
    runner->before_step = [this](const ForwardBatch&) { return gate.pass(); };
    engine = std::move(*Engine::create(options, std::move(runner), fake_tokenizer()));
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

// Runs until the engine is idle and counts the events of each choice.
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

class EngineAbortWithSteps : public testing::TestWithParam<int> {};

TEST_P(EngineAbortWithSteps, AtEachStage) {
  struct Stage {
    const char* name;
    int64_t at_step;
    int n;
  };
  // The prompt has 100 tokens in chunks of 40: steps 1 to 3 are prefill, then one token per step.
  for (const Stage& stage :
       {Stage{"first chunk", 1, 1}, Stage{"mid prompt", 2, 1}, Stage{"decode", 6, 1},
        Stage{"choices", 2, 3}, Stage{"choices decode", 9, 3}}) {
    SCOPED_TRACE(stage.name);
    GatedEngine gated(stage.at_step, {.max_num_seqs = 8, .max_batched_tokens = 40}, {}, GetParam());
    EventQueue queue;
    const RequestId id = *gated.engine->submit(plain_request(100, 1000, stage.n), queue.sink());
    gated.wait();
    EXPECT_GT(gated.engine->stats().queued_requests + 1, 0);
    gated.engine->abort(id);
    gated.engine->abort(id);
    gated.open();
    expect_one_abort(queue, stage.n);
    gated.engine->abort(id);
    EXPECT_TRUE(gated.engine->drain(60s));
    EXPECT_EQ(gated.engine->stats().pages_used, 0);
    EXPECT_LE(gated.engine->stats().steps, stage.at_step) << "the step under way is the last";
  }
}

INSTANTIATE_TEST_SUITE_P(InFlight, EngineAbortWithSteps, testing::Values(1, 2));

TEST(EngineAbort, WhileQueuedAndWhilePreempted) {
  GatedEngine gated(3, {.max_num_seqs = 2, .max_batched_tokens = 200, .preempt_every = 2},
                    {.num_pages = 40});
  EventQueue first, second, third;
  ASSERT_TRUE(gated.engine->submit(plain_request(10, 20), first.sink()));
  // Both are submitted before the gate's first step ends. The second is preempted in steps 2 and 4,
  // the third stays queued.
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
  EXPECT_TRUE(gated.engine->drain(60s));
  EXPECT_EQ(gated.engine->stats().pages_used, 0);
}

TEST(EngineAbort, FromTheSinkItself) {
  auto runner = std::make_unique<FakeRunner>(FakeModel{});
  auto engine = std::move(*Engine::create({}, std::move(runner), fake_tokenizer()));
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
  EXPECT_EQ(gated.engine->stats().rejected, 2);  // both submissions were refused
  gated.open();
  EXPECT_TRUE(gated.engine->drain(60s));
  const auto late = gated.engine->submit(plain_request(5, 5), [](const Event&) { FAIL(); });
  ASSERT_FALSE(late);
  EXPECT_EQ(late.error().code, Code::kUnavailable);
  EXPECT_EQ(gated.engine->has_room().error().code, Code::kUnavailable);
}

// Each choice of a request computes its prompt.
TEST(Engine, TheQueueCountsAPromptForEachChoice) {
  GatedEngine gated(1, {.max_num_seqs = 1, .max_batched_tokens = 64, .max_queued_tokens = 40});
  EventQueue running, queued, fits;
  // No assertions while the engine waits at the gate, because the engine's destructor would never
  // return.
  EXPECT_TRUE(gated.engine->submit(plain_request(5, 5), running.sink()));
  gated.wait();
  EXPECT_TRUE(gated.engine->submit(plain_request(10, 5, 3), queued.sink()));
  EXPECT_EQ(gated.engine->stats().queued_tokens, 30);
  const auto refused = gated.engine->submit(plain_request(6, 5, 2), [](const Event&) {});
  EXPECT_EQ(refused ? "" : refused.error().message,
            "the queue is full: 30 prompt tokens wait and this request has 12, at most 40 may");
  EXPECT_TRUE(gated.engine->submit(plain_request(5, 5, 2), fits.sink()));
  EXPECT_EQ(gated.engine->stats().queued_tokens, 40);
  gated.open();
  EXPECT_TRUE(gated.engine->drain(10s));
  EXPECT_EQ(gated.engine->stats().queued_tokens, 0);
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
  auto engine = std::move(*Engine::create({}, std::move(runner), fake_tokenizer()));
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

TEST(Engine, WhatAFailedStepHadBegunIsForgotten) {
  auto runner = std::make_unique<FakeRunner>(FakeModel{}, /*max_steps_in_flight=*/2);
  std::atomic<int64_t> steps_left = -1;  // negative: no step fails
  runner->before_finish = [&steps_left]() -> Result<> {
    if (steps_left >= 0 && steps_left-- == 0)
      return error(Code::kInternal, "the device is on fire");
    return {};
  };
  auto engine = std::move(*Engine::create({}, std::move(runner), fake_tokenizer()));
  std::vector<EventQueue> failing(3);
  for (EventQueue& queue : failing) {
    Request request = plain_request(200, 1000);
    request.prompt_ids[0] = static_cast<int32_t>(&queue - failing.data());
    ASSERT_TRUE(engine->submit(std::move(request), queue.sink()));
  }
  steps_left = 10;
  for (EventQueue& queue : failing) {
    std::optional<Event> last;
    while (auto event = queue.next()) last = std::move(event);
    EXPECT_EQ(last->error.message, "the device is on fire");
  }
  EXPECT_EQ(engine->stats().failed, 3);
  EventQueue again;
  ASSERT_TRUE(engine->submit(plain_request(200, 3), again.sink()));
  std::optional<Event> last;
  while (auto event = again.next()) last = std::move(event);
  EXPECT_EQ(last->finish, FinishReason::kLength);
  EXPECT_EQ(last->usage.cached_tokens, 0);
}

// A failed step also ends sequences that took part only in later steps: they may have read pages
// that the failed step was to write.
TEST(Engine, AFailedStepEndsTheSequencesOfTheNextThatHasBegun) {
  Gate gate;
  auto runner = std::make_unique<FakeRunner>(FakeModel{}, /*max_steps_in_flight=*/2);
  runner->before_step = [&gate](const ForwardBatch&) { return gate.pass(); };
  int finished = 0;
  runner->before_finish = [&finished]() -> Result<> {
    if (++finished == 1) return error(Code::kInternal, "the device is on fire");
    return {};
  };
  auto engine = std::move(*Engine::create({.max_num_seqs = 8, .max_batched_tokens = 10},
                                          std::move(runner), fake_tokenizer()));
  EventQueue first, second;
  ASSERT_TRUE(engine->submit(plain_request(10, 5), first.sink()));
  gate.reached.get_future().wait();
  ASSERT_TRUE(engine->submit(plain_request(10, 5), second.sink()));  // part of the next step
  gate.opened.set_value();
  for (EventQueue* queue : {&first, &second}) {
    std::optional<Event> last;
    while (auto event = queue->next()) last = std::move(event);
    EXPECT_EQ(last->finish, FinishReason::kError);
    EXPECT_EQ(last->error.message, "the device is on fire");
  }
  EventQueue third;
  ASSERT_TRUE(engine->submit(plain_request(10, 5), third.sink()));
  std::optional<Event> last;
  while (auto event = third.next()) last = std::move(event);
  EXPECT_EQ(last->finish, FinishReason::kLength);
  EXPECT_EQ(last->error.message, "") << "what was said of others is forgotten";
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
      std::move(*Engine::create({}, std::make_unique<FakeRunner>(FakeModel{}), fake_tokenizer()));
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

// Runs a request to its end and returns its last event.
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
  EXPECT_TRUE(gated.engine->drain(60s));
}

// A clock that the test sets and the engine's thread reads.
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
  EXPECT_TRUE(endless.engine->drain(60s));
  EXPECT_EQ(endless.engine->stats().expired, 2);
  EXPECT_EQ(endless.engine->stats().length, 1);
}

// Returns the order in which requests submitted one second apart begin, with max_num_seqs 1.
std::vector<int> order_of(const std::vector<int32_t>& priorities, std::chrono::seconds ageing) {
  const ManualClock clock;
  GatedEngine gated(1, {.max_num_seqs = 1, .priority_ageing = ageing, .clock = clock});
  EventQueue first;
  EXPECT_TRUE(gated.engine->submit(plain_request(5, 1), first.sink()));
  gated.wait();
  std::vector<int> ended;
  for (size_t i = 0; i < priorities.size(); ++i) {
    Request request = plain_request(5, 1);
    request.priority = priorities[i];
    *clock.seconds += 1;
    EXPECT_TRUE(gated.engine->submit(request, [&ended, i](const Event& event) {
      if (event.finish) ended.push_back(static_cast<int>(i));
    }));
  }
  gated.open();
  EXPECT_TRUE(gated.engine->drain(60s));
  return ended;
}

TEST(EnginePriority, WaitingIsWorthALevelEachSoManySeconds) {
  const std::vector<int32_t> two_levels_down = {2, 0, 0, 0, 0, 0, 0, 0};
  EXPECT_EQ(order_of(two_levels_down, 3s), (std::vector<int>{1, 2, 3, 4, 5, 6, 0, 7}))
      << "six seconds are two levels; among equals the higher level goes first";
  EXPECT_EQ(order_of(two_levels_down, 0s), (std::vector<int>{1, 2, 3, 4, 5, 6, 7, 0}));
  EXPECT_EQ(order_of({0, 0, -1, 0}, 5s), (std::vector<int>{2, 0, 1, 3}));
}

TEST(EnginePriority, NoPriorityStarvesOthersForEver) {
  constexpr int32_t kLeast = std::numeric_limits<int32_t>::max(), kMost = -kLeast - 1;
  std::vector<int32_t> priorities(2 * kMostPriorityLevels + 5, kMost);
  priorities[0] = kLeast;
  std::vector<int> expected;
  for (int i = 1; i <= 2 * kMostPriorityLevels; ++i) expected.push_back(i);
  expected.push_back(0);
  for (int i = 2 * kMostPriorityLevels + 1; i < std::ssize(priorities); ++i) expected.push_back(i);
  EXPECT_EQ(order_of(priorities, 1s), expected);
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
