// Failing steps: a lost device makes the engine dead at once, a transient failure does not.
#include <gtest/gtest.h>

#include <future>
#include <thread>

#include "engine/engine.h"
#include "engine/event_queue.h"
#include "engine/fake_runner.h"
#include "engine/fake_tokenizer.h"
#include "engine/serial_oracle.h"

namespace fathom {
namespace {

using namespace std::chrono_literals;

Request request_of(int64_t prompt, int64_t max_tokens, int n = 1) {
  Request request;
  for (int64_t i = 0; i < prompt; ++i) request.prompt_ids.push_back(static_cast<int32_t>(i % 250));
  request.sampling.max_tokens = max_tokens;
  request.sampling.ignore_eos = true;
  request.sampling.seed = 5;
  request.sampling.n = n;
  return request;
}

struct Ends {
  int finals = 0, deaths = 0;
  bool dead_when_told = true;
};

// Runs eight choices, three at a time, on a device that is lost at its third step, either in
// begin() or in finish().
void expect_all_told(int steps_in_flight, bool at_finish) {
  SCOPED_TRACE(testing::Message() << steps_in_flight << " in flight, at finish " << at_finish);
  auto runner = std::make_unique<FakeRunner>(FakeModel{}, steps_in_flight);
  std::promise<void> submitted;
  const std::function<Result<>()> fault = [&, fake = runner.get(),
                                           steps = 0]() mutable -> Result<> {
    if (++steps == 1) submitted.get_future().wait();
    if (steps < 3) return {};
    fake->lost = true;
    return error(Code::kInternal, "an illegal address");
  };
  if (at_finish) {
    runner->before_finish = fault;
  } else {
    runner->before_step = [fault](const ForwardBatch&) { return fault(); };
  }
  auto engine =
      std::move(*Engine::create({.max_num_seqs = 3}, std::move(runner), fake_tokenizer()));
  Ends ends;
  for (const int n : {1, 3, 1, 2, 1}) {
    const auto sink = [&](const Event& event) {
      if (!event.finish) return;
      ++ends.finals;
      ends.deaths += event.finish == FinishReason::kError &&
                     event.error.code == Code::kUnavailable &&
                     event.error.message == "the engine is dead: an illegal address";
      ends.dead_when_told &= engine->is_dead();
    };
    ASSERT_TRUE(engine->submit(request_of(70, 50, n), sink));
  }
  EXPECT_FALSE(engine->is_dead());
  submitted.set_value();
  EXPECT_TRUE(engine->wait_until_dead(60s));
  EXPECT_TRUE(engine->drain(60s)) << "everybody has been told";
  EXPECT_EQ(ends.finals, 8);
  EXPECT_EQ(ends.deaths, 8);
  EXPECT_TRUE(ends.dead_when_told);
  const auto refused = engine->submit(request_of(5, 5), [](const Event&) { ADD_FAILURE(); });
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Code::kUnavailable);
  EXPECT_EQ(refused.error().message, "the engine is dead: an illegal address");
  EXPECT_FALSE(engine->has_room());
  engine->stop();
  const EngineStats stats = engine->stats();
  EXPECT_EQ(stats.pages_used + stats.pages_cached, 0);
  EXPECT_EQ(stats.running + stats.waiting + stats.queued_requests, 0);
}

TEST(EngineDeath, ALostDeviceEndsEverybodyAtOnce) {
  for (const int steps_in_flight : {1, 2}) {
    for (const bool at_finish : {false, true}) expect_all_told(steps_in_flight, at_finish);
  }
}

// Runs an engine whose first `failures` steps fail with `code`. Returns the number of requests that
// fail before one succeeds, or -1 if the engine dies.
int64_t requests_that_fail(int64_t failures, Code code, bool at_finish) {
  auto runner = std::make_unique<FakeRunner>(FakeModel{});
  const std::function<Result<>()> fault = [left = failures, code]() mutable -> Result<> {
    if (left-- <= 0) return {};
    return error(code, "a fault");
  };
  if (at_finish) {
    runner->before_finish = fault;
  } else {
    runner->before_step = [fault](const ForwardBatch&) { return fault(); };
  }
  auto engine = std::move(*Engine::create({}, std::move(runner), fake_tokenizer()));
  for (int64_t failed = 0;; ++failed) {
    EventQueue queue;
    if (!engine->submit(request_of(10, 1), queue.sink())) return -1;
    const auto event = queue.next();
    EXPECT_TRUE(event && event->finish);
    if (event->finish != FinishReason::kError) return failed;
    EXPECT_EQ(engine->is_dead(), event->error.code == Code::kUnavailable) << event->error.message;
  }
}

TEST(EngineDeath, FailuresThatPassKillNobody) {
  for (const bool at_finish : {false, true}) {
    for (const int64_t failures : {int64_t{1}, int64_t{2}, kMostFailedSteps - 1}) {
      EXPECT_EQ(requests_that_fail(failures, Code::kInternal, at_finish), failures);
    }
    EXPECT_EQ(requests_that_fail(100, Code::kResourceExhausted, at_finish), 100);
  }
}

TEST(EngineDeath, FailuresThatStayDo) {
  for (const bool at_finish : {false, true}) {
    EXPECT_EQ(requests_that_fail(kMostFailedSteps, Code::kInternal, at_finish), -1);
  }
}

// While a step that computes pages is in flight, two long prompts with the same prefix are
// admitted, and only the first fits into the next step. The steps fail. The second long prompt then
// holds pages that were never written.
TEST(EngineDeath, WhatASequenceHoldsOfAFailedStepIsComputedAgain) {
  const FakeModel model{.num_pages = 200};
  auto runner = std::make_unique<FakeRunner>(model, /*max_steps_in_flight=*/2);
  std::promise<void> first_begun, submitted;
  runner->before_step = [&, steps = 0](const ForwardBatch&) mutable -> Result<> {
    if (++steps == 1) {
      first_begun.set_value();
      submitted.get_future().wait();
    }
    return {};
  };
  runner->before_finish = [steps = 0]() mutable -> Result<> {
    if (++steps == 1) return error(Code::kInternal, "a fault");
    return {};
  };
  auto engine = std::move(
      *Engine::create({.max_num_seqs = 8, .max_batched_tokens = 128, .long_prompt_rows = 128},
                      std::move(runner), fake_tokenizer()));
  const auto tokenizer = fake_tokenizer();
  std::vector<Request> requests = {request_of(128, 5), request_of(900, 5), request_of(901, 5)};
  // The texts differ after the common prefix, otherwise the second would wait for the first.
  for (size_t i = 128; i < 901; ++i) requests[2].prompt_ids[i] = static_cast<int32_t>(i * 7 % 240);
  std::vector<AnswerCollector> answers;
  for (const Request& request : requests) answers.emplace_back(request.sampling.n);
  for (size_t i = 0; i < requests.size(); ++i) {
    ASSERT_TRUE(
        engine->submit(requests[i], [&answers, i](const Event& event) { answers[i].add(event); }));
    if (i == 0) first_begun.get_future().wait();
  }
  submitted.set_value();
  EXPECT_TRUE(engine->drain(60s));
  EXPECT_EQ(answers[0].answers[0].finish, FinishReason::kError);
  EXPECT_EQ(answers[1].answers[0].finish, FinishReason::kError);
  ASSERT_EQ(answers[2].answers[0].finish, FinishReason::kLength) << "it was in neither step";
  expect_equal(answers[2].answers[0], serial_answer(model, *tokenizer, requests[2], 0),
               "the third");
  EXPECT_FALSE(engine->is_dead());
}

}  // namespace
}  // namespace fathom
