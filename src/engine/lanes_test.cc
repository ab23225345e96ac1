// Engines of several lanes over the fake model: which lane a request gets, what is copied and moved
// between lanes, and that steps with prompts are shared. Random loads are in engine_test.cc.
#include "engine/lanes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <future>
#include <map>
#include <thread>

#include "engine/engine.h"
#include "engine/event_queue.h"
#include "engine/fake_runner.h"
#include "engine/plain_request.h"

namespace fathom {
namespace {

using namespace std::chrono_literals;

constexpr int64_t kLongAnswer = 1500;

Request request_in_lane(int64_t prompt, int64_t max_tokens, std::optional<int> lane = {}) {
  Request request = plain_request(prompt, max_tokens);
  request.lane = lane;
  return request;
}

// A runner that records the rows of each lane in each step, and calls a hook before each step.
class RecordingRunner : public FakeRunner {
 public:
  using FakeRunner::FakeRunner;

  Result<ConstTensorView> forward(std::span<const ForwardBatch> lanes) override {
    auto& rows = steps.emplace_back();
    for (const ForwardBatch& batch : lanes) rows.push_back(batch.num_rows());
    if (on_step) on_step(std::ssize(steps));
    return FakeRunner::forward(lanes);
  }

  std::vector<std::vector<int64_t>> steps;
  std::function<void(int64_t step)> on_step;
};

// The engine, held before its first step until all requests of a test are submitted.
struct HeldEngine {
  HeldEngine(FakeModel model, const EngineOptions& options) {
    auto owned = std::make_unique<RecordingRunner>(model);
    runner = owned.get();
    runner->on_step = [this](int64_t step) {
      if (step == 1) held.get_future().wait();
      if (on_step) on_step(step);
    };
    engine = std::move(*Engine::create(options, std::move(owned), fake_tokenizer()));
  }
  // A request that occupies the first step: the engine takes the others together after it.
  void submit_first(int lane) {
    first = std::make_unique<EventQueue>();
    EXPECT_TRUE(engine->submit(request_in_lane(3, 2, lane), first->sink()));
  }
  void submit(Request request) {
    queues.emplace_back();
    EXPECT_TRUE(engine->submit(std::move(request), queues.back().sink()));
  }
  void release() { held.set_value(); }

  std::promise<void> held;
  std::function<void(int64_t step)> on_step;
  RecordingRunner* runner = nullptr;
  std::unique_ptr<EventQueue> first;
  std::deque<EventQueue> queues;
  std::unique_ptr<Engine> engine;
};

TEST(Lanes, RequestsSpreadByLoad) {
  HeldEngine held({.num_pages = 400, .num_lanes = 4}, {});
  EngineStats seen;
  for (int i = 0; i < 8; ++i) held.submit(request_in_lane(5 + i, 40));
  held.on_step = [&](int64_t step) {
    if (step == 6) seen = held.engine->stats();
  };
  held.release();
  for (EventQueue& queue : held.queues) last_event(queue);
  ASSERT_EQ(seen.lanes.size(), 4u);
  for (const LaneStats& lane : seen.lanes) EXPECT_EQ(lane.running, 2);
  EXPECT_EQ(seen.running, 8);
  EXPECT_EQ(seen.pages_total, 1600);
}

TEST(Lanes, ChoicesOfARequestGoTogether) {
  HeldEngine held({.num_pages = 400, .num_lanes = 2}, {});
  EngineStats seen;
  held.submit_first(1);
  Request request = request_in_lane(200, 40);
  request.sampling.n = 4;
  held.submit(std::move(request));
  held.on_step = [&](int64_t step) {
    if (step == 8) seen = held.engine->stats();
  };
  held.release();
  EXPECT_EQ(last_event(held.queues[0]).usage.cached_tokens, 192);
  EXPECT_EQ(std::max(seen.lanes[0].running, seen.lanes[1].running), 4);
}

TEST(Lanes, AnAskedForLaneIsKept) {
  HeldEngine held({.num_pages = 400, .num_lanes = 3}, {.max_num_seqs = 2});
  held.submit_first(0);
  for (int i = 0; i < 5; ++i) held.submit(request_in_lane(10, 10, 2));
  EngineStats seen;
  held.on_step = [&](int64_t step) {
    if (step == 4) seen = held.engine->stats();
  };
  held.release();
  for (EventQueue& queue : held.queues) last_event(queue);
  EXPECT_EQ(seen.lanes[2].running, 2);
  EXPECT_EQ(seen.lanes[2].waiting, 3);
  EXPECT_EQ(held.engine->stats().sequences_moved, 0);
  const auto refused = held.engine->submit(request_in_lane(10, 10, 3), [](const Event&) {});
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().message, "the data-parallel rank is 3, there are 3: 0 to 2");
}

// The second request has the first one's 200 tokens, in another lane.
int64_t cached_in_another_lane(bool can_copy, EngineStats& stats) {
  auto owned = std::make_unique<FakeRunner>(FakeModel{.num_pages = 40, .num_lanes = 2});
  owned->can_copy = can_copy;
  const auto engine = std::move(*Engine::create({}, std::move(owned), fake_tokenizer()));
  Event last[2];
  for (int lane = 0; lane < 2; ++lane) {
    EventQueue queue;
    EXPECT_TRUE(engine->submit(request_in_lane(200, 70, lane), queue.sink()));
    while (auto event = queue.next()) last[lane] = std::move(*event);
  }
  EXPECT_TRUE(engine->drain(60s));
  stats = engine->stats();
  EXPECT_EQ(last[0].usage.cached_tokens, 0);
  return last[1].usage.cached_tokens;
}

TEST(Lanes, PrefixesAreCopiedFromAnotherLane) {
  EngineStats stats;
  EXPECT_EQ(cached_in_another_lane(true, stats), 192);
  EXPECT_EQ(stats.pages_copied, 3);
  EXPECT_EQ(cached_in_another_lane(false, stats), 0);
  EXPECT_EQ(stats.pages_copied, 0);
}

TEST(Lanes, AWaitingSequenceMovesToALaneWithRoom) {
  HeldEngine held({.num_pages = 400, .num_lanes = 2}, {.max_num_seqs = 1});
  held.submit_first(0);
  held.submit(request_in_lane(20, kLongAnswer));  // keeps one lane
  held.submit(request_in_lane(20, 30));           // leaves the other
  held.submit(request_in_lane(20, 30));           // waits behind one of them
  held.submit(request_in_lane(20, 30));
  held.release();
  for (size_t i : {1, 2, 3}) {
    const Event last = last_event(held.queues[i]);
    EXPECT_EQ(last.finish, FinishReason::kLength);
    EXPECT_FALSE(held.queues[0].ended());
  }
  EXPECT_GE(held.engine->stats().sequences_moved, 1);
  EXPECT_LT(held.engine->stats().steps, kLongAnswer) << "it did not wait for the long one";
}

// A lane's pages run out while another has plenty: the preempted sequence goes on there, with its
// full pages copied.
TEST(Lanes, APreemptedSequenceMovesWithItsPages) {
  HeldEngine held({.num_pages = 10, .num_lanes = 2}, {.max_num_seqs = 4});
  held.submit_first(1);
  held.submit(request_in_lane(250, 330, 0));
  Request other = request_in_lane(260, 330);
  std::reverse(other.prompt_ids.begin(), other.prompt_ids.end());
  Request third = request_in_lane(100, 20, 1);
  held.submit(std::move(third));  // lane 1 is busier at first: the next goes to lane 0
  Request fourth = request_in_lane(90, 20, 1);
  held.submit(std::move(fourth));
  held.submit(std::move(other));
  held.release();
  for (EventQueue& queue : held.queues) {
    EXPECT_EQ(last_event(queue).finish, FinishReason::kLength);
  }
  EXPECT_TRUE(held.engine->drain(60s));
  const EngineStats stats = held.engine->stats();
  EXPECT_EQ(stats.sequences_moved, 1);
  EXPECT_GE(stats.pages_copied, 4);
  EXPECT_EQ(stats.pages_used, 0);
}

// Two lanes decode; a prompt arrives for each, one a step later than the other.
TEST(Lanes, PromptsAreAdmittedInTheSameSteps) {
  HeldEngine held({.num_pages = 400, .num_lanes = 2}, {});
  held.submit_first(0);
  held.submit(request_in_lane(5, 200, 0));
  held.submit(request_in_lane(6, 200, 1));
  held.on_step = [&](int64_t step) {
    if (step == 20) held.submit(request_in_lane(50, 2, 0));
    if (step == 21) held.submit(request_in_lane(60, 2, 1));
    // Both at once: the same step takes both.
    if (step == 40) held.submit(request_in_lane(70, 2, 0));
    if (step == 40) held.submit(request_in_lane(80, 2, 1));
  };
  held.release();
  last_event(held.queues[0]);
  last_event(held.queues[1]);
  const auto& steps = held.runner->steps;
  ASSERT_GT(steps.size(), 42u);
  EXPECT_GE(steps[20][0], 50);
  EXPECT_EQ(steps[21], (std::vector<int64_t>{2, 1})) << "decode alone after a step with prompts";
  EXPECT_GE(steps[22][1], 60);
  EXPECT_GE(steps[40][0], 70);
  EXPECT_GE(steps[40][1], 80);
}

// A lane that has nothing else takes its prompts in every step, whatever fits into each.
TEST(Lanes, LeftOverPromptsDoNotWait) {
  HeldEngine held({.num_pages = 400, .num_lanes = 2},
                  {.max_num_seqs = 8, .max_batched_tokens = 16});
  held.submit_first(0);
  held.submit(request_in_lane(5, 100, 0));
  held.on_step = [&](int64_t step) {
    if (step == 20) held.submit(request_in_lane(96, 2, 1));
  };
  held.release();
  last_event(held.queues[0]);
  for (size_t step = 20; step < 26; ++step) EXPECT_EQ(held.runner->steps[step][1], 16) << step;
}

}  // namespace
}  // namespace fathom
